"""The tokens of a batch of requests: one forward for their prompts, then one for every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from plait.errors import InputError
from plait.inference.choose import ENDS, GOES_ON, Chooser
from plait.inference.predictor import Predictor, Read
from plait.inference.requests import Answer, Request
from plait.inference.rope_by_length import rope_by_length
from plait.inference.settings import Settings
from plait.inference.vocabulary import tokens_of_tokenizer
from plait.sharded.cache import cache_argument, keep_rows, wait_for_layers
from plait.sharded.model import ShardedModel

OnToken = Callable[[int, int], None]
"""(request, token), as soon as the token is chosen."""


class Decoder:
    """Of one rank. All ranks of a model's parts (tp, pp) have the same requests."""

    def __init__(
        self,
        sharded: ShardedModel,
        predictor: Predictor,
        settings: Settings,
        *,
        tokenizer: Any,
        use_cache: bool,
        offload_cache: bool,
        prefill_tokens: int | None,
        on_token: OnToken | None,
        tells: bool,
    ) -> None:
        """`tells`: whether any rank has an `on_token`."""
        self._sharded = sharded
        self._settings = settings
        self._tokenizer = tokenizer
        self._tokens = tokens_of_tokenizer(tokenizer)
        self._rope = rope_by_length(sharded.model)
        self._on_token = on_token
        self._tells = tells
        self._use_cache = use_cache
        self._prefill = prefill_tokens
        self._offload_cache = offload_cache
        self.predictor = predictor

    def forwards(
        self, requests: Sequence[Request], numbers: Sequence[int], answers: Sequence[Answer]
    ) -> Iterator[None]:
        """Decode `requests`, which have these `numbers` for `on_token`; yields before every
        forward. New tokens are added to `answers`.
        """
        if self._rope is not None and self._rope.remembers(
            max(request.most_seen for request in requests)
        ):
            yield
            self.predictor.idle()
        chooser, state = self.predictor.on_all(partial(self._begun, requests))
        rows = list(range(len(requests)))
        """Those that are computed; ones that have ended may be among them."""
        while True:
            read: Read | None = None
            for run in state.next_forwards():
                yield
                read = run()
            nothing = torch.empty(3, len(rows), dtype=torch.float64)
            chosen = self.predictor.of_first(partial(_choose, chooser, read, rows), nothing)
            ids = chosen[0].long().tolist()
            probabilities = chosen[1].tolist()
            ends = chosen[2].long().tolist()
            going = [at for at, row in enumerate(rows) if not answers[row].finish_reason]
            for at in going:
                answers[rows[at]].token_ids.append(ids[at])
                answers[rows[at]].logprobs.append(probabilities[at])
                answers[rows[at]].finish_reason = ENDS[ends[at]]
            if self._tells:
                self._tell([(numbers[rows[at]], ids[at]) for at in going])
            if all(ends):
                return
            rows = [
                rows[at]
                for at in state.add(ids, [at for at, end in enumerate(ends) if end == GOES_ON])
            ]

    def _begun(self, requests: Sequence[Request]) -> tuple[Chooser | None, _Cached | _Recomputed]:
        first = self.predictor.is_first
        chooser = (
            Chooser(requests, self._settings, self._tokenizer, tokens=self._tokens)
            if first
            else None
        )
        return chooser, _Cached(self, requests) if self._use_cache else _Recomputed(self, requests)

    def _tell(self, tokens: list[tuple[int, int]]) -> None:
        """Call `on_token` where this rank has one. Where it fails, all ranks of the model's parts
        raise.
        """
        failed: Exception | None = None
        try:
            if self._on_token is not None:
                for request, token in tokens:
                    self._on_token(request, token)
        except Exception as error:  # whatever it is, the others wait for this rank
            failed = error
        self.predictor.raise_together(failed)


def _choose(chooser: Chooser | None, read: Read | None, rows: list[int]) -> torch.Tensor:
    """On the rank that has a chooser."""
    assert chooser is not None and read is not None
    return chooser(read(), rows)


class _Cached:
    """Requests whose keys and values are kept. Prompts are padded on the left, so that all go on at
    the same place.
    """

    def __init__(self, decoder: Decoder, requests: Sequence[Request]) -> None:
        self._decoder = decoder
        self._rope = decoder._rope
        longest = max(len(request.token_ids) for request in requests)
        pad = decoder._settings.pad_token_id
        self._ids = torch.tensor(
            [[pad] * (longest - len(r.token_ids)) + list(r.token_ids) for r in requests]
        )
        self._mask = torch.tensor(
            [[0] * (longest - len(r.token_ids)) + [1] * len(r.token_ids) for r in requests]
        )
        self._begin()

    def _begin(self) -> None:
        """The model has seen nothing."""
        self._cache = self._decoder._sharded.new_cache(on_host=self._decoder._offload_cache)
        self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        """Of the tokens from `_start` on, which were added together."""
        self._start = self._seen = 0

    def next_forwards(self) -> Iterator[Callable[[], Read]]:
        """Over the tokens that the model has not seen, in pieces of `prefill_tokens`; whole where
        rotary frequencies would be others.
        """
        end = self._ids.shape[1]
        is_past = self._rope is not None and int(self._positions.max()) >= self._rope.original
        step = end if is_past else self._decoder._prefill or end
        while self._seen < end:
            low = self._seen
            high = min(self._seen + step, end)
            positions = self._positions[:, low - self._start : high - self._start]
            inputs = {
                "input_ids": self._ids[:, low:high],
                "attention_mask": self._mask[:, :high],
                "position_ids": positions,
            }
            yield partial(self._decoder.predictor.last, inputs, self._cache)
            self._seen = high
            if self._cache.get_seq_length() != high:
                argument = cache_argument(self._decoder._sharded.model)
                error = InputError(
                    f"the model was given {high} tokens and its cache holds"
                    f" {self._cache.get_seq_length()}: forward= of plait.initialize does not pass"
                    f" `{argument}` to the model, or the model does not use it; keep none:"
                    ' use_cache=False, or "use_cache": false in the generation_config.json of its'
                    " folder"
                )
                self._decoder.predictor.fail(error)

    def add(self, tokens: list[int], going: list[int]) -> list[int]:
        """One token for every request. Returns which rows are left: those in `going`, where what is
        kept of the others can be dropped.
        """
        self._start, self._positions = self._ids.shape[1], self._positions[:, -1:].clone()
        self._positions[going] += (
            # one that has ended may stay, and must not get past the length at which rotary
            # frequencies change
            1
        )
        self._ids = torch.cat([self._ids, torch.tensor(tokens).unsqueeze(1)], dim=1)
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        left = list(range(len(tokens)))
        if len(going) < len(tokens) and keep_rows(self._cache, torch.tensor(going)):
            self._ids, self._mask, self._positions = (
                self._ids[going],
                self._mask[going],
                self._positions[going],
            )
            left = going
        if (
            self._rope is not None
            and self._rope.reads_anew
            and int(self._positions.max()) == self._rope.original
        ):
            wait_for_layers(self._cache)
            self._begin()  # keys of both kinds of frequencies do not go together
        return left


class _Recomputed:
    """Requests of a model that keeps nothing: every token takes a forward over all before it.
    Padded on the right, where a causal model does not look.
    """

    def __init__(self, decoder: Decoder, requests: Sequence[Request]) -> None:
        self._decoder = decoder
        self._rows = [list(request.token_ids) for request in requests]

    def next_forwards(self) -> Iterator[Callable[[], Read]]:
        """One, over everything."""
        longest = max(map(len, self._rows))
        pad = self._decoder._settings.pad_token_id
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in self._rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in self._rows])
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": torch.arange(longest).expand_as(ids),
        }
        if "use_cache" in self._decoder.predictor.takes:
            inputs["use_cache"] = False  # type: ignore[assignment]
        last = torch.tensor([len(row) - 1 for row in self._rows])
        yield partial(self._decoder.predictor.last, inputs, None, last)

    def add(self, tokens: list[int], going: list[int]) -> list[int]:
        """One token for every request that goes on, which are left."""
        self._rows = [[*self._rows[at], tokens[at]] for at in going]
        return going
