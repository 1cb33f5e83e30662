"""The next token of every request, from the logits of the last position.

A request draws from its own generator, one number a token, and takes the token at which the
cumulative probability passes it. So its tokens follow from its seed and its logits alone, whatever
is in the batch beside it and whatever layout computes the logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from plait.errors import InputError
from plait.importing import MissingExtraError, install_line
from plait.inference.requests import Request
from plait.inference.settings import Settings
from plait.inference.text_stream import text_after
from plait.inference.vocabulary import tokens_of_tokenizer

ENDS = ("", "length", "stop")
"""Why a request has ended, by the number that ranks send each other; "" for one that goes on."""
GOES_ON, LENGTH, STOP = range(3)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """In float32."""
    return torch.log_softmax(logits.float(), dim=-1)


_NOT_FINITE = (
    "request {row} has no token left to choose, or its logits are not finite (NaN weights?)"
)


class Chooser:
    """Of the requests of one batch. Only the rank that chooses has one."""

    def __init__(
        self,
        requests: Sequence[Request],
        settings: Settings,
        tokenizer: Any,
        *,
        tokens: int | None = None,
    ) -> None:
        """`tokens`: those of the tokenizer, where they are counted already."""
        self._settings, self._tokenizer, self._tokens = (
            settings,
            tokenizer,
            tokens or tokens_of_tokenizer(tokenizer),
        )
        self._known = [list(request.token_ids) for request in requests]
        """Of every request: the prompt and the tokens since."""
        self._prompts = [len(request.token_ids) for request in requests]
        self._limits = [request.new_tokens for request in requests]
        self._generators = [
            None if request.seed is None else torch.Generator().manual_seed(request.seed)
            for request in requests
        ]
        self._processors = [
            _processors(settings, request.token_ids, self._tokens) for request in requests
        ]
        self.ends = [GOES_ON] * len(requests)

    def __call__(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """`logits` [rows, vocabulary] of these requests. Returns float64 [3, rows] on the CPU:
        token, its log probability, and which of `ENDS` holds after it. Requests that have ended get
        padding.
        """
        width = logits.shape[-1]
        logits = logits[..., : self._tokens]  # others pad an embedding
        logprobs = log_softmax(logits)
        if not any(self._processors) and not self._settings.do_sample:
            tokens = logits.argmax(dim=-1).tolist()
        else:
            # As wide as the model's: prompts may have tokens that the tokenizer lacks, and
            # processors look their scores up.
            scores = F.pad(logits.float().cpu(), (0, width - logits.shape[-1]), value=-math.inf)
            tokens = [
                0 if self.ends[row] else self._choose(row, scores[at])
                for at, row in enumerate(rows)
            ]
        chosen = (
            logprobs.gather(1, torch.tensor(tokens, device=logprobs.device).unsqueeze(1))[:, 0]
            .double()
            .tolist()
        )
        for at, row in enumerate(rows):
            if self.ends[row]:
                tokens[at], chosen[at] = self._settings.pad_token_id, 0.0
                continue
            token = tokens[at]
            if not math.isfinite(chosen[at]):
                raise InputError(_NOT_FINITE.format(row=row))
            self._known[row].append(token)
            self.ends[row] = (
                STOP if self._stops(row) else LENGTH if self._at_limit(row) else GOES_ON
            )
        return torch.tensor([tokens, chosen, [self.ends[row] for row in rows]], dtype=torch.float64)

    def known(self, row: int) -> list[int]:
        """Tokens of a request: its prompt's, and those since."""
        return list(self._known[row])

    def _at_limit(self, row: int) -> bool:
        return len(self._known[row]) - self._prompts[row] >= self._limits[row]

    def _stops(self, row: int) -> bool:
        """Whether the last token of a request ends it."""
        new = self._known[row][self._prompts[row] :]
        if new and new[-1] in self._settings.eos_token_id:
            return True
        if not self._settings.stop_strings:
            return False
        # What the user sees, and special tokens, which are stop strings themselves in some chat
        # formats.
        prompt = self._known[row][: self._prompts[row]]
        texts = [
            text_after(self._tokenizer, prompt, new, skip_special_tokens=skipped)
            for skipped in (True, False)
        ]
        return any(stop in text for stop in self._settings.stop_strings for text in texts)

    def _choose(self, row: int, scores: torch.Tensor) -> int:
        known = torch.tensor([self._known[row]])
        scores = scores.unsqueeze(0)
        for process in self._processors[row]:
            scores = process(known, scores)
        if not bool(torch.isfinite(scores.max())):
            raise InputError(_NOT_FINITE.format(row=row))
        generator = self._generators[row]
        if not self._settings.do_sample or generator is None:
            return int(scores.argmax())
        passed = torch.softmax(scores[0].double(), dim=0).cumsum(0)
        number = torch.rand((), generator=generator, dtype=torch.float64) * passed[-1]
        return min(int(torch.searchsorted(passed, number, right=True)), len(passed) - 1)


def _processors(s: Settings, token_ids: tuple[int, ...], tokens: int | None) -> list[Any]:
    """Transformers' own, in its order: penalties and bans, then, for a draw, temperature and
    limits. Empty where nothing is asked for. `token_ids`: the prompt. `tokens`: how many can be
    chosen, where that is fewer than the model has.
    """
    prompt = len(token_ids)
    eos = list(s.eos_token_id)
    asked = torch.tensor([token_ids])
    bad_words = [list(word) for word in s.bad_words_ids if tokens is None or max(word) < tokens]
    wanted: list[tuple[str, bool, Any]] = [
        (
            "EncoderRepetitionPenaltyLogitsProcessor",
            s.encoder_repetition_penalty != 1,
            lambda make: make(penalty=float(s.encoder_repetition_penalty), encoder_input_ids=asked),
        ),
        (
            "RepetitionPenaltyLogitsProcessor",
            s.repetition_penalty != 1,
            lambda make: make(penalty=float(s.repetition_penalty)),
        ),
        (
            "NoRepeatNGramLogitsProcessor",
            s.no_repeat_ngram_size > 0,
            lambda make: make(s.no_repeat_ngram_size),
        ),
        (
            "EncoderNoRepeatNGramLogitsProcessor",
            s.encoder_no_repeat_ngram_size > 0,
            lambda make: make(s.encoder_no_repeat_ngram_size, asked),
        ),
        ("NoBadWordsLogitsProcessor", bool(bad_words), lambda make: make(bad_words, eos or None)),
        (
            "MinLengthLogitsProcessor",
            s.min_length > 0 and bool(eos),
            lambda make: make(s.min_length, eos),
        ),
        (
            "MinNewTokensLengthLogitsProcessor",
            s.min_new_tokens > 0 and bool(eos),
            lambda make: make(prompt, s.min_new_tokens, eos),
        ),
        (
            "SuppressTokensLogitsProcessor",
            bool(s.suppress_tokens),
            lambda make: make(list(s.suppress_tokens)),
        ),
        (
            "SuppressTokensAtBeginLogitsProcessor",
            bool(s.begin_suppress_tokens),
            lambda make: make(list(s.begin_suppress_tokens), prompt),
        ),
    ]
    if s.do_sample:
        wanted += [
            (
                "TemperatureLogitsWarper",
                s.temperature != 1,
                lambda make: make(float(s.temperature)),
            ),
            ("TopKLogitsWarper", s.top_k > 0, lambda make: make(top_k=s.top_k)),
            ("TopPLogitsWarper", s.top_p < 1, lambda make: make(top_p=float(s.top_p))),
            ("MinPLogitsWarper", bool(s.min_p), lambda make: make(min_p=s.min_p)),
            ("TypicalLogitsWarper", s.typical_p < 1, lambda make: make(mass=s.typical_p)),
            (
                "EpsilonLogitsWarper",
                0 < s.epsilon_cutoff < 1,
                lambda make: make(epsilon=s.epsilon_cutoff),
            ),
            ("EtaLogitsWarper", 0 < s.eta_cutoff < 1, lambda make: make(epsilon=s.eta_cutoff)),
        ]
    names = [(name, make) for name, used, make in wanted if used]
    if not names:
        return []
    try:
        import transformers
    except ImportError:
        raise MissingExtraError(
            "generate: sampling, penalties and bans are computed by Transformers, which is not"
            f" installed; run {install_line('hf')}, or decode greedily (do_sample=False)"
        ) from None
    return [make(getattr(transformers, name)) for name, make in names]
