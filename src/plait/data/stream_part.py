"""A data-parallel rank's part of an iterable data set, whose length may not be known: batches are formed as one process forms them, and
dealt in rounds, one to each rank."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from plait.checkpoint.agreement import together
from plait.data.cache import digest
from plait.errors import InputError

_COMPARED = 16
"""Rows."""


class StreamPart(IterableDataset[Any]):
    """A rank's part of an iterable data set, which every rank reads in full."""

    def __init__(self, dataset: Any, *, batch_size: int, ranks: int, index: int, drop_last: bool, repeats: bool = False) -> None:
        """`repeats`: samples, where the last ones do not suffice for all ranks; else a rank without any has another's."""
        self.dataset, self.batch_size, self.ranks, self.index, self.drop_last = dataset, batch_size, ranks, index, drop_last
        self.repeats = repeats
        self.epoch = 0
        self.skipped = 0
        """Samples of all ranks that the next pass reads and leaves out."""
        self._last: tuple[int, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Shuffled data sets have an order for every epoch."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        samples, round_ = len(self.dataset), self.batch_size * self.ranks
        return (samples // round_ if self.drop_last else math.ceil(samples / round_)) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        self._last = None
        own = getattr(self.dataset, "generator", None)
        if isinstance(own, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            own.manual_seed(self.epoch)
        size, position = self.batch_size, 0
        dealt: list[Any] = []
        for sample in islice(self.dataset, self.skipped, None):
            dealt.append(sample)
            if len(dealt) == size * self.ranks:
                yield from dealt[self.index * size : (self.index + 1) * size]
                dealt, position = [], position + 1
        if not dealt or self.drop_last:
            return
        if self.ranks > 1 and (self.repeats or get_worker_info() is not None):
            # Of a worker nobody outside learns which rank has none: repeat, as Accelerate does.
            filled = dealt * math.ceil(size * self.ranks / len(dealt))
            yield from filled[self.index * size : (self.index + 1) * size]
            return
        self._last = position, math.ceil(len(dealt) / size)
        yield from dealt[self.index * size : (self.index + 1) * size] or dealt[:size]

    def present(self, position: int) -> int:
        """How many ranks have a batch of their own at a position of the epoch that was read."""
        return self._last[1] if self._last is not None and position == self._last[0] else self.ranks

    @property
    def present_last(self) -> int:
        """How many have at the last position of an epoch that was read to its end."""
        return self._last[1] if self._last is not None else self.ranks


def refuse_other_orders(data: Any, *, device: torch.device) -> None:
    """Raise InputError where the first rows of a data set of the `datasets` library are not those of other ranks: each rank takes its part
    of what it reads itself. Collective over all ranks."""
    if type(data).__module__.partition(".")[0] != "datasets" or not dist.is_initialized():
        return
    doing = "reading the first rows of the data set"
    _, found = together(lambda: _first_rows(data), str.encode, device=device, doing=doing, raising=InputError)
    if len(set(found)) > 1:
        raise InputError(
            "the data set: its first rows differ between ranks, so samples would be left out and others repeated; give shuffle(), and "
            "interleave_datasets(), a seed, and let all machines read the same files"
        )


def _first_rows(data: Any) -> str:
    return digest([json.dumps(row, sort_keys=True, default=_plain) for row in islice(data, _COMPARED)])


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__
