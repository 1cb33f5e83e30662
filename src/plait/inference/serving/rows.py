"""Requests of different lengths that are decoded by one forward, and join and leave between forwards.

Keys and values are padded on the left, so that all requests go on at the same place. A request that joins has its prompt read alone; then
the shorter of the two is padded and both are one. What all of them have padded is cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from plait.errors import InputError
from plait.inference.choose import ENDS, Chooser
from plait.inference.serving.job import Job, Told
from plait.sharded.cache import keep_rows, wait_for_layers

Predict = Callable[[dict[str, torch.Tensor], Any], torch.Tensor]
"""(inputs, cache) to logits [rows, vocabulary] of the last position; keys and values are added to the cache."""


class Rows:
    """Of jobs that have had their first token, and go on."""

    def __init__(self, job: Job, chooser: Chooser, cache: Any, token: int, *, is_past: bool = False) -> None:
        """`is_past`: the original length of a rotary embedding that follows the length."""
        self.jobs, self._choosers, self.cache, self._is_past = [job], [chooser], cache, is_past
        self._mask = torch.ones((1, len(chooser.known(0)) - 1), dtype=torch.long)
        self._tokens = [token]
        """The last of each, which the model has not seen."""

    @property
    def length(self) -> int:
        """Of the cache, with padding."""
        return self._mask.shape[1]

    def step(self, predict: Predict) -> None:
        """A token for every job; those that have ended with it, or were cancelled, are dropped."""
        self.drop_cancelled()
        if not self.jobs:
            return
        positions = self._mask.sum(1, keepdim=True)
        self._mask = F.pad(self._mask, (0, 1), value=1)
        inputs = {"input_ids": torch.tensor(self._tokens).unsqueeze(1), "attention_mask": self._mask, "position_ids": positions}
        logits = predict(inputs, self.cache)
        going = []
        for row, job in enumerate(self.jobs):
            try:
                self._tokens[row], ended = chosen(job, self._choosers[row], logits[row : row + 1])
            except InputError as error:  # its logits are not finite; the others go on
                job.tell(Told(error=str(error)))
                continue
            if not ended:
                going.append(row)
        self._keep(going)

    def drop_cancelled(self) -> None:
        """Free what cancelled jobs have."""
        self._keep([row for row, job in enumerate(self.jobs) if not job.is_cancelled])

    def without(self, length: int) -> tuple[Job, Chooser] | None:
        """Take out a job of which the model has seen `length` tokens, if there is one."""
        for row, seen in enumerate(self._mask.sum(1).tolist() if self.jobs else ()):
            if seen == length:
                found = self.jobs[row], self._choosers[row]
                self._keep([at for at in range(len(self.jobs)) if at != row])
                return found
        return None

    def can_take(self, other: Rows) -> bool:
        """Whether the two can be one: each layer keeps all tokens, and nothing else; and rotary frequencies are the same."""
        return self._is_past == other._is_past and _is_plain(self.cache) and _is_plain(other.cache)

    def take(self, other: Rows) -> None:
        """The jobs of both; `other` is empty afterwards."""
        length = max(self.length, other.length)
        for cache in (self.cache, other.cache):
            wait_for_layers(cache)
        for mine, its in zip(self.cache.layers, other.cache.layers, strict=True):
            if mine.is_initialized and its.is_initialized:
                for name in ("keys", "values"):
                    place = getattr(mine, name).device  # of layers that wait on the host, the next one's is the device already
                    both = [_padded(getattr(one, name).to(place), length) for one in (mine, its)]
                    setattr(mine, name, torch.cat(both))
                    setattr(its, name, None)
        masks = [F.pad(one._mask, (length - one.length, 0)) for one in (self, other)]
        self._mask = torch.cat(masks)
        self.jobs += other.jobs
        self._choosers += other._choosers
        self._tokens += other._tokens
        other.jobs = []

    def _keep(self, rows: list[int]) -> None:
        if len(rows) == len(self.jobs):
            return
        self.jobs = [self.jobs[row] for row in rows]
        self._choosers = [self._choosers[row] for row in rows]
        self._tokens = [self._tokens[row] for row in rows]
        self._mask = self._mask[rows]
        if not rows:
            self.cache = None
            return
        keep_rows(self.cache, torch.tensor(rows))
        if not _is_plain(self.cache):
            return
        padded = int(self._mask.any(dim=0).int().argmax())
        if padded:
            self._mask = self._mask[:, padded:]
            for layer in self.cache.layers:
                if layer.is_initialized:
                    layer.keys, layer.values = layer.keys[:, :, padded:].contiguous(), layer.values[:, :, padded:].contiguous()


def started(job: Job, chooser: Chooser, predict: Predict, cache: Any, *, prefill: int | None, original: int | None = None) -> Rows | None:
    """Read all tokens of a job, `prefill` of them at a time (None: whole), and choose its next one; None where it has ended or was
    cancelled. More tokens than `original`, the length of a rotary embedding that follows the length, are read whole."""
    ids = torch.tensor([chooser.known(0)])
    logits = torch.empty(0)
    is_past = original is not None and ids.shape[1] > original
    step = ids.shape[1] if is_past else prefill or ids.shape[1]
    for low in range(0, ids.shape[1], step):
        if job.is_cancelled:
            return None
        high = min(low + step, ids.shape[1])
        mask = torch.ones((1, high), dtype=torch.long)
        inputs = {"input_ids": ids[:, low:high], "attention_mask": mask, "position_ids": torch.arange(low, high).unsqueeze(0)}
        logits = predict(inputs, cache)
    token, ended = chosen(job, chooser, logits)
    return None if ended else Rows(job, chooser, cache, token, is_past=is_past)


def chosen(job: Job, chooser: Chooser, logits: torch.Tensor) -> tuple[int, bool]:
    """(the next token of a job, whether it has ended), which the client is told."""
    token, _, end = chooser(logits, [0])[:, 0].tolist()
    job.tell(Told(int(token), ENDS[int(end)]))
    return int(token), bool(end)


def _is_plain(cache: Any) -> bool:
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in cache.layers)


def _padded(kept: torch.Tensor, length: int) -> torch.Tensor:
    """Keys or values [rows, heads, tokens, width]."""
    return F.pad(kept, (0, 0, length - kept.shape[2], 0))
