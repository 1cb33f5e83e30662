"""Choice of the next token of every request from the logits of its last position.

Note [Reproducible draws]
    Each request draws from its own generator, one number per token. It takes the token at which the
    cumulative probability exceeds that number. Its tokens therefore depend only on its seed and its
    logits. They do not depend on other requests of the batch, or on the layout that computes the
    logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from plait.errors import InputError
from plait.importing import MissingExtraError, install_line
from plait.inference.generation_settings import GenerationSettings, tokens_of_tokenizer
from plait.inference.requests import GenerationRequest, text_after

ENDS = ("", "length", "stop")
"""Finish reasons, by the numbers that ranks send each other. An unfinished request has ""."""
UNFINISHED, LENGTH, STOP = range(3)

_NOT_FINITE = (
    "request {row} has no token left to choose, or its logits are not finite (NaN weights?)"
)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return log probabilities over the last dimension, computed in float32."""
    return torch.log_softmax(logits.float(), dim=-1)


class TokenSampler:
    """Chooses the next tokens of the requests of one batch.

    It exists only on the rank that reads the logits.

    Args:
        requests: The requests of the batch.
        settings: Settings of the call.
        tokenizer: A tokenizer, which stop strings need, or None.
        tokens: Number of tokens of the tokenizer, if it has been computed before.
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
            float64 [3, rows] on the CPU: the token, its log probability, and the index in `ENDS` of
            the finish reason after it. Finished requests get the padding token.

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

    def known(self, row: int) -> list[int]:
        """Return the tokens of a request: those of its prompt, and the new ones."""
        return list(self._known[row])

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
            "generate: sampling, penalties and bans are computed by Transformers, which is not"
            f" installed; run {install_line('hf')}, or decode greedily (do_sample=False)"
        ) from None
    return [make(getattr(transformers, name)) for name, make in used]


def _penalties(
    s: GenerationSettings, token_ids: tuple[int, ...], tokens: int | None
) -> Iterator[_Processor]:
    """Yield penalties and bans, which also apply without sampling."""
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
    """Yield temperature and limits, which only apply to sampling."""
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
