"""Decoding of a batch of requests: a prefill of their prompts, then one forward per token.

`Decoder` runs the forwards, on every rank. `TokenSampler` chooses the next tokens from the logits
of the last positions, on the rank that reads them.

Note [Padding]
    With a KV cache, prompts are padded on the left, so that all requests append at the same
    position. Without a cache, sequences are padded on the right, because causal attention does not
    read later positions.

Note [Reproducible draws]
    Each request draws from its own generator, one number per token. The next token is the first one
    at which the cumulative probability exceeds that number. The tokens of a request therefore
    depend only on its seed and its logits. They do not depend on other requests of the batch, or on
    the layout that computes the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from plait.errors import InputError
from plait.importing import MissingExtraError, install_line
from plait.inference.generation_settings import GenerationSettings, tokens_of_tokenizer
from plait.inference.predictor import LogitsReader, Predictor
from plait.inference.requests import Answer, GenerationRequest, text_after
from plait.inference.rope_by_length import rope_by_length
from plait.sharded.cache import cache_argument, keep_rows, wait_for_layers
from plait.sharded.model import ShardedModel

ENDS = ("", "length", "stop")
"""Finish reasons, by the numbers that ranks send each other. An unfinished request has ""."""
UNFINISHED, LENGTH, STOP = range(3)

_NOT_FINITE = (
    "request {row} has no token left to choose, or its logits are not finite (NaN weights?)"
)

OnToken = Callable[[int, int], None]
"""Callback with the number of a request and its new token, called when the token is chosen."""


@dataclass
class Decoder:
    """Decoder of batches of requests on one rank.

    All ranks of one model replica (tp, pp) decode the same requests.

    Attributes:
        sharded: The model.
        predictor: Predictor that runs the model's forwards.
        settings: Settings of the call.
        tokenizer: A tokenizer, or None.
        use_cache: Whether to keep keys and values between forwards.
        prefill_tokens: Largest number of tokens of each prompt in one forward. None means no limit.
        on_token: Callback of this rank, or None.
        any_callback: Whether any rank has a callback.
    """

    sharded: ShardedModel
    predictor: Predictor
    settings: GenerationSettings
    tokenizer: Any
    use_cache: bool
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
            numbers: Indices of the requests in the call, which the callback receives.
            answers: Answers to the requests, to which new tokens are added.
        """
        longest = max(request.max_tokens_read for request in requests)
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
        """Call this rank's callback, if it has one. Collective over the ranks of one replica.

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
        self._cache = self._decoder.sharded.new_cache(on_host=self._decoder.settings.offload_cache)
        # Padding gets position 0. The mask excludes it from attention.
        self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        """Positions of the tokens from `_start` on."""
        self._start = 0
        self._seen = 0
        """Number of tokens per request that the model has read."""

    def next_forwards(self) -> Iterator[Callable[[], LogitsReader]]:
        """Yield the forwards over all tokens that the model has not read yet.

        Each forward has at most `prefill_tokens` tokens per request. If rotary frequencies depend
        on the length of the input, the prompts are read in one forward.
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
            " it; use no cache: use_cache=False, or"
            ' "use_cache": false in the generation_config.json of its folder'
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
            and self._rope.rereads_tokens
            and int(self._positions.max()) == self._rope.original
        ):
            # From here on the frequencies differ from those of the cached keys.
            wait_for_layers(self._cache)
            self._reset()
        return rows


class _UncachedBatch:
    """Requests of one batch without a cache. Every token needs a forward over all previous tokens.

    See Note [Padding].
    """

    def __init__(self, decoder: Decoder, requests: Sequence[GenerationRequest]) -> None:
        self._decoder = decoder
        self._rows = [list(request.token_ids) for request in requests]

    def next_forwards(self) -> Iterator[Callable[[], LogitsReader]]:
        """Yield one forward over all tokens."""
        predictor = self._decoder.predictor
        inputs = predictor.padded_inputs(self._rows, self._decoder.settings.pad_token_id)
        last = torch.tensor([len(row) - 1 for row in self._rows])
        yield partial(predictor.last_logits, inputs, None, last)

    def add(self, tokens: list[int], unfinished: list[int]) -> list[int]:
        """Add one token to every request that continues. Return the indices of these requests."""
        self._rows = [[*self._rows[index], tokens[index]] for index in unfinished]
        return unfinished


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return log probabilities over the last dimension, computed in float32."""
    return torch.log_softmax(logits.float(), dim=-1)


class TokenSampler:
    """Sampler of the next tokens of the requests of one batch.

    It exists only on the rank that reads the logits.

    Args:
        requests: The requests of the batch.
        settings: Settings of the call.
        tokenizer: A tokenizer, which stop strings need, or None.
        tokens: Result of `tokens_of_tokenizer`, if the caller has computed it.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        settings: GenerationSettings,
        tokenizer: Any,
        *,
        tokens: int | None = None,
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._tokens = tokens or tokens_of_tokenizer(tokenizer)
        self._known = [list(request.token_ids) for request in requests]
        """Tokens of every request: those of the prompt, and the new ones."""
        self._prompt_lengths = [len(request.token_ids) for request in requests]
        self._limits = [request.new_tokens for request in requests]
        self._generators = [_generator(request.seed) for request in requests]
        self._processors = [
            _processors(settings, request.token_ids, self._tokens) for request in requests
        ]
        self.ends = [UNFINISHED] * len(requests)
        """Finish reason of every request, as an index of `ENDS`."""

    def __call__(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Choose the next tokens of some requests.

        Args:
            logits: Logits [rows, vocabulary] of the last positions.
            rows: Indices of the requests.

        Returns:
            float64 [3, rows] on the CPU: the token, its log probability, and the index of the
            request's finish reason in `ENDS`. Finished requests get the padding token.

        Raises:
            InputError: No token can be chosen, e.g. because logits are NaN.
        """
        width = logits.shape[-1]
        # The embedding may be padded to more rows than the tokenizer has tokens.
        logits = logits[..., : self._tokens]
        # Before penalties and temperature: results are those of the model's own distribution.
        logprobs = log_softmax(logits)
        if not any(self._processors) and not self._settings.do_sample:
            # The logits of all requests stay on the device.
            tokens = logits.argmax(dim=-1).tolist()
        else:
            # As wide as the model's logits: prompts may have tokens that the tokenizer lacks, and
            # processors index the scores with them.
            scores = F.pad(logits.float().cpu(), (0, width - logits.shape[-1]), value=-math.inf)
            tokens = []
            for index, row in enumerate(rows):
                tokens.append(0 if self.ends[row] else self._sample(row, scores[index]))

        columns = torch.tensor(tokens, device=logprobs.device).unsqueeze(1)  # [rows, 1]
        chosen = logprobs.gather(1, columns)[:, 0].double().tolist()
        for index, row in enumerate(rows):
            if self.ends[row]:
                tokens[index] = self._settings.pad_token_id
                chosen[index] = 0.0
                continue
            if not math.isfinite(chosen[index]):
                raise InputError(_NOT_FINITE.format(row=row))
            self._known[row].append(tokens[index])
            self.ends[row] = self._end(row)
        # float64 represents tokens and log probabilities exactly.
        return torch.tensor([tokens, chosen, [self.ends[row] for row in rows]], dtype=torch.float64)

    def _end(self, row: int) -> int:
        if self._stops(row):
            return STOP
        if len(self._known[row]) - self._prompt_lengths[row] >= self._limits[row]:
            return LENGTH
        return UNFINISHED

    def _stops(self, row: int) -> bool:
        """Return True if a stop token or a stop string ends a request."""
        prompt = self._known[row][: self._prompt_lengths[row]]
        new = self._known[row][self._prompt_lengths[row] :]
        if new and new[-1] in self._settings.eos_token_id:
            return True
        if not self._settings.stop_strings:
            return False
        # Without special tokens it is the text that the user gets. In some chat formats special
        # tokens are stop strings themselves.
        for skip in (True, False):
            text = text_after(self._tokenizer, prompt, new, skip_special_tokens=skip)
            if any(stop in text for stop in self._settings.stop_strings):
                return True
        return False

    def _sample(self, row: int, scores: torch.Tensor) -> int:
        """Return the next token of one request from its scores [vocabulary]."""
        known = torch.tensor([self._known[row]])
        scores = scores.unsqueeze(0)  # [1, vocabulary], as processors expect
        for process in self._processors[row]:
            scores = process(known, scores)
        if not bool(torch.isfinite(scores.max())):
            raise InputError(_NOT_FINITE.format(row=row))
        generator = self._generators[row]
        if not self._settings.do_sample or generator is None:
            return int(scores.argmax())

        # See Note [Reproducible draws].
        cumulative = torch.softmax(scores[0].double(), dim=0).cumsum(0)
        # By rounding, the last sum can differ from 1, and the number can reach it.
        number = torch.rand((), generator=generator, dtype=torch.float64) * cumulative[-1]
        return min(int(torch.searchsorted(cumulative, number, right=True)), len(cumulative) - 1)


def _generator(seed: int | None) -> torch.Generator | None:
    if seed is None:
        return None
    return torch.Generator().manual_seed(seed)


_Processor = tuple[str, bool, Callable[[Any], Any]]
"""Name of a class of Transformers, whether it is used, and a function that instantiates it."""


def _processors(
    settings: GenerationSettings, token_ids: tuple[int, ...], tokens: int | None
) -> list[Any]:
    """Return Transformers' logits processors for one request, in Transformers' order.

    Args:
        settings: Settings of the call.
        token_ids: The prompt.
        tokens: Number of tokens that can be chosen, if it is smaller than the model's vocabulary.
    """
    processors = list(_penalties(settings, token_ids, tokens))
    if settings.do_sample:
        processors += _warpers(settings)
    used = [(name, make) for name, is_used, make in processors if is_used]
    if not used:
        return []
    try:
        import transformers
    except ImportError:
        raise MissingExtraError(
            "generate: sampling, penalties and banned tokens are computed by Transformers, which is"
            f" not installed; run {install_line('hf')}, or decode greedily (do_sample=False)"
        ) from None
    return [make(getattr(transformers, name)) for name, make in used]


def _penalties(
    s: GenerationSettings, token_ids: tuple[int, ...], tokens: int | None
) -> Iterator[_Processor]:
    """Yield processors for penalties and bans, which also apply without sampling."""
    prompt_length = len(token_ids)
    prompt = torch.tensor([token_ids])
    eos = list(s.eos_token_id)
    bad_words = [list(word) for word in s.bad_words_ids if tokens is None or max(word) < tokens]
    yield (
        "EncoderRepetitionPenaltyLogitsProcessor",
        s.encoder_repetition_penalty != 1,
        lambda make: make(penalty=float(s.encoder_repetition_penalty), encoder_input_ids=prompt),
    )
    yield (
        "RepetitionPenaltyLogitsProcessor",
        s.repetition_penalty != 1,
        lambda make: make(penalty=float(s.repetition_penalty)),
    )
    yield (
        "NoRepeatNGramLogitsProcessor",
        s.no_repeat_ngram_size > 0,
        lambda make: make(s.no_repeat_ngram_size),
    )
    yield (
        "EncoderNoRepeatNGramLogitsProcessor",
        s.encoder_no_repeat_ngram_size > 0,
        lambda make: make(s.encoder_no_repeat_ngram_size, prompt),
    )
    yield (
        "NoBadWordsLogitsProcessor",
        bool(bad_words),
        lambda make: make(bad_words, eos or None),
    )
    yield (
        "MinLengthLogitsProcessor",
        s.min_length > 0 and bool(eos),
        lambda make: make(s.min_length, eos),
    )
    yield (
        "MinNewTokensLengthLogitsProcessor",
        s.min_new_tokens > 0 and bool(eos),
        lambda make: make(prompt_length, s.min_new_tokens, eos),
    )
    yield (
        "SuppressTokensLogitsProcessor",
        bool(s.suppress_tokens),
        lambda make: make(list(s.suppress_tokens)),
    )
    yield (
        "SuppressTokensAtBeginLogitsProcessor",
        bool(s.begin_suppress_tokens),
        lambda make: make(list(s.begin_suppress_tokens), prompt_length),
    )


def _warpers(s: GenerationSettings) -> Iterator[_Processor]:
    """Yield processors for temperature and truncation, which only apply to sampling."""
    yield "TemperatureLogitsWarper", s.temperature != 1, lambda make: make(float(s.temperature))
    yield "TopKLogitsWarper", s.top_k > 0, lambda make: make(top_k=s.top_k)
    yield "TopPLogitsWarper", s.top_p < 1, lambda make: make(top_p=float(s.top_p))
    yield "MinPLogitsWarper", bool(s.min_p), lambda make: make(min_p=s.min_p)
    yield "TypicalLogitsWarper", s.typical_p < 1, lambda make: make(mass=s.typical_p)
    yield (
        "EpsilonLogitsWarper",
        0 < s.epsilon_cutoff < 1,
        lambda make: make(epsilon=s.epsilon_cutoff),
    )
    yield "EtaLogitsWarper", 0 < s.eta_cutoff < 1, lambda make: make(epsilon=s.eta_cutoff)
