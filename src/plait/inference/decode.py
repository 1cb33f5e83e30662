"""Decoding of a batch of requests: a prefill of their prompts, then one forward per token.

Note [Padding]
    With a KV cache, prompts are padded on the left, so that all requests append at the same
    position. Without a cache, sequences are padded on the right, where a causal model does not
    attend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from plait.errors import InputError
from plait.inference.generation_settings import GenerationSettings, tokens_of_tokenizer
from plait.inference.predictor import LogitsReader, Predictor
from plait.inference.requests import Answer, GenerationRequest
from plait.inference.rope_by_length import rope_by_length
from plait.inference.sampling import ENDS, UNFINISHED, TokenSampler
from plait.sharded.cache import cache_argument, keep_rows, wait_for_layers
from plait.sharded.model import ShardedModel

OnToken = Callable[[int, int], None]
"""Callback with the number of a request and its new token, called when the token is chosen."""


@dataclass
class Decoder:
    """Decodes batches of requests on one rank.

    All ranks that hold parts of one model (tp, pp) decode the same requests.

    Attributes:
        sharded: The model.
        predictor: Runs its forwards.
        settings: Settings of the call.
        tokenizer: A tokenizer, or None.
        use_cache: Whether to keep keys and values between forwards.
        offload_cache: Whether to keep them in host memory.
        prefill_tokens: Largest number of tokens of each prompt in one forward. None is no limit.
        on_token: Callback of this rank.
        any_callback: Whether any rank has a callback.
    """

    sharded: ShardedModel
    predictor: Predictor
    settings: GenerationSettings
    tokenizer: Any
    use_cache: bool
    offload_cache: bool
    prefill_tokens: int | None
    on_token: OnToken | None
    any_callback: bool

    def __post_init__(self) -> None:
        self.rope = rope_by_length(self.sharded.model)
        # Counted once, because every batch has a sampler of its own.
        self._tokens = tokens_of_tokenizer(self.tokenizer)

    def forwards(
        self,
        requests: Sequence[GenerationRequest],
        numbers: Sequence[int],
        answers: Sequence[Answer],
    ) -> Iterator[None]:
        """Decode a batch of requests. Yields before every forward.

        Args:
            requests: The requests.
            numbers: Their numbers for the callback.
            answers: Their answers, to which new tokens are added.
        """
        longest = max(request.most_seen for request in requests)
        if self.rope is not None and self.rope.remembers(longest):
            yield
            self.predictor.idle()

        sampler, state = self.predictor.run_on_all(partial(self._start, requests))
        # Requests that are computed, finished ones included until the state drops them.
        rows = list(range(len(requests)))
        while True:
            read: LogitsReader | None = None
            for run in state.next_forwards():
                yield
                read = run()

            # One rank samples; the others receive its tokens.
            template = torch.empty(3, len(rows), dtype=torch.float64)
            chosen = self.predictor.compute_on_first(
                partial(_sample, sampler, read, rows), template
            )
            ids = chosen[0].long().tolist()
            logprobs = chosen[1].tolist()
            ends = chosen[2].long().tolist()

            new_tokens = []
            for index, row in enumerate(rows):
                answer = answers[row]
                if answer.finish_reason:
                    continue
                answer.token_ids.append(ids[index])
                answer.logprobs.append(logprobs[index])
                answer.finish_reason = ENDS[ends[index]]
                new_tokens.append((numbers[row], ids[index]))
            if self.any_callback:
                self._call_back(new_tokens)
            if all(ends):
                return

            unfinished = [index for index, end in enumerate(ends) if end == UNFINISHED]
            rows = [rows[index] for index in state.add(ids, unfinished)]

    def _start(
        self, requests: Sequence[GenerationRequest]
    ) -> tuple[TokenSampler | None, _CachedBatch | _UncachedBatch]:
        sampler = None
        if self.predictor.is_first:
            sampler = TokenSampler(requests, self.settings, self.tokenizer, tokens=self._tokens)
        if self.use_cache:
            return sampler, _CachedBatch(self, requests)
        return sampler, _UncachedBatch(self, requests)

    def _call_back(self, tokens: list[tuple[int, int]]) -> None:
        """Call this rank's callback, if it has one. Collective over the parts of the model.

        Raises:
            Exception: The callback has failed on one of these ranks.
        """
        failure: Exception | None = None
        try:
            if self.on_token is not None:
                for request, token in tokens:
                    self.on_token(request, token)
        except Exception as error:  # the other ranks wait for this one, whatever the error is
            failure = error
        self.predictor.raise_together(failure)


def _sample(
    sampler: TokenSampler | None, read: LogitsReader | None, rows: list[int]
) -> torch.Tensor:
    # Called only on the rank that has a sampler.
    assert sampler is not None and read is not None
    return sampler(read(), rows)


class _CachedBatch:
    """Requests of one batch with a KV cache. See Note [Padding]."""

    def __init__(self, decoder: Decoder, requests: Sequence[GenerationRequest]) -> None:
        self._decoder = decoder
        self._rope = decoder.rope
        longest = max(len(request.token_ids) for request in requests)
        pad = decoder.settings.pad_token_id
        ids = []
        mask = []
        for request in requests:
            padding = longest - len(request.token_ids)
            ids.append([pad] * padding + list(request.token_ids))
            mask.append([0] * padding + [1] * len(request.token_ids))
        self._ids = torch.tensor(ids)  # [requests, tokens]
        self._mask = torch.tensor(mask)  # [requests, tokens]
        self._reset()

    def _reset(self) -> None:
        """Create an empty cache, so that the model reads all tokens again."""
        self._cache = self._decoder.sharded.new_cache(on_host=self._decoder.offload_cache)
        # Padding gets position 0. The mask excludes it from attention.
        self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        """Positions of the tokens from `_start` on."""
        self._start = 0
        self._seen = 0
        """Number of tokens per request that the model has read."""

    def next_forwards(self) -> Iterator[Callable[[], LogitsReader]]:
        """Yield the forwards over all tokens that the model has not read.

        Each has at most `prefill_tokens` tokens per request. If rotary frequencies depend on the
        length of the input, the prompts are read in one forward.
        """
        end = self._ids.shape[1]
        is_past = self._rope is not None and int(self._positions.max()) >= self._rope.original
        step = self._decoder.prefill_tokens or end
        if is_past:
            # All keys of a prompt need the frequencies of its full length.
            step = end
        while self._seen < end:
            low = self._seen
            high = min(self._seen + step, end)
            inputs = {
                "input_ids": self._ids[:, low:high],
                "attention_mask": self._mask[:, :high],
                "position_ids": self._positions[:, low - self._start : high - self._start],
            }
            yield partial(self._decoder.predictor.last_logits, inputs, self._cache)
            self._seen = high
            self._check_length(high)

    def _check_length(self, tokens: int) -> None:
        """Raise InputError if the model has not written all tokens to the cache."""
        length = self._cache.get_seq_length()
        if length == tokens:
            return
        argument = cache_argument(self._decoder.sharded.model)
        error = InputError(
            f"the model was given {tokens} tokens and its cache holds {length}: forward= of"
            f" plait.initialize does not pass `{argument}` to the model, or the model does not use"
            ' it; keep none: use_cache=False, or "use_cache": false in the generation_config.json'
            " of its folder"
        )
        self._decoder.predictor.fail(error)

    def add(self, tokens: list[int], unfinished: list[int]) -> list[int]:
        """Add one token to every request.

        Args:
            tokens: The new tokens.
            unfinished: Indices of the requests that continue.

        Returns:
            Indices of the requests that are computed from now on: `unfinished`, or all if the cache
            cannot drop rows.
        """
        self._start = self._ids.shape[1]
        self._positions = self._positions[:, -1:].clone()
        # A finished request may stay in the batch. Its position must not exceed the length at which
        # rotary frequencies change.
        self._positions[unfinished] += 1
        self._ids = torch.cat([self._ids, torch.tensor(tokens).unsqueeze(1)], dim=1)
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)

        rows = list(range(len(tokens)))
        if len(unfinished) < len(tokens) and keep_rows(self._cache, torch.tensor(unfinished)):
            self._ids = self._ids[unfinished]
            self._mask = self._mask[unfinished]
            self._positions = self._positions[unfinished]
            rows = unfinished
        if (
            self._rope is not None
            and self._rope.reads_anew
            and int(self._positions.max()) == self._rope.original
        ):
            # From here on the frequencies differ from those of the cached keys.
            wait_for_layers(self._cache)
            self._reset()
        return rows


class _UncachedBatch:
    """Requests of one batch without a cache: every token takes a forward over all tokens before it.

    See Note [Padding].
    """

    def __init__(self, decoder: Decoder, requests: Sequence[GenerationRequest]) -> None:
        self._decoder = decoder
        self._rows = [list(request.token_ids) for request in requests]

    def next_forwards(self) -> Iterator[Callable[[], LogitsReader]]:
        """Yield one forward over all tokens."""
        longest = max(map(len, self._rows))
        pad = self._decoder.settings.pad_token_id
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in self._rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in self._rows])
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": torch.arange(longest).expand_as(ids),
        }
        predictor = self._decoder.predictor
        if "use_cache" in predictor.takes:
            inputs["use_cache"] = False
        last = torch.tensor([len(row) - 1 for row in self._rows])
        yield partial(predictor.last_logits, inputs, None, last)

    def add(self, tokens: list[int], unfinished: list[int]) -> list[int]:
        """Add one token to every request that continues, and return their indices."""
        self._rows = [[*self._rows[index], tokens[index]] for index in unfinished]
        return unfinished
