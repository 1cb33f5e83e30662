"""A data-parallel rank's part of an iterable data set, whose length may not be known: batches are
formed as one process forms them, and dealt in rounds, one to each rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from plait.data.draws import drawn_from
from plait.data.split_rows import digest_of_rows, refuse_other_digest


class StreamPart(IterableDataset[Any]):
    """A rank's part of an iterable data set, which every rank reads in full."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        ranks: int,
        index: int,
        drop_last: bool,
        repeats: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """Read one rank's batches of a data set.

        Args:
            dataset: The iterable data set that all ranks read.
            batch_size: Samples per batch of a rank.
            ranks: Number of data-parallel ranks.
            index: This rank's index among them.
            drop_last: Whether the last samples are left out if they do not fill a batch per rank.
            repeats: Whether samples are repeated if the last ones do not suffice for all ranks.
                Otherwise a rank without a batch gets that of another.
            device: Device of the collectives that compare the first samples between ranks. None
                if they have been compared, or cannot be.
        """
        self.dataset = dataset
        self.batch_size = batch_size
        self.ranks = ranks
        self.index = index
        self.drop_last = drop_last
        self.repeats = repeats
        self._device = device
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
        samples = len(self.dataset)
        round_ = self.batch_size * self.ranks
        return (
            samples // round_ if self.drop_last else math.ceil(samples / round_)
        ) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        self._last = None
        own = getattr(self.dataset, "generator", None)
        if isinstance(own, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            own.manual_seed(self.epoch)
        size = self.batch_size
        position = 0
        dealt: list[Any] = []
        samples: Iterator[Any] = islice(self.dataset, self.skipped, None)
        if self._device is not None and get_worker_info() is None:
            samples = chain(self._compared(samples), samples)
        for sample in samples:
            dealt.append(sample)
            if len(dealt) == size * self.ranks:
                yield from dealt[self.index * size : (self.index + 1) * size]
                dealt = []
                position = position + 1
        if not dealt or self.drop_last:
            return
        if self.ranks > 1 and (self.repeats or get_worker_info() is not None):
            # Of a worker nobody outside learns which rank has none: repeat, as Accelerate does.
            filled = dealt * math.ceil(size * self.ranks / len(dealt))
            yield from filled[self.index * size : (self.index + 1) * size]
            return
        self._last = position, math.ceil(len(dealt) / size)
        yield from dealt[self.index * size : (self.index + 1) * size] or dealt[:size]

    def _compared(self, samples: Iterator[Any]) -> list[Any]:
        """Return the samples of the first round after comparing them between ranks.

        Collective over all ranks. They are read with the same random numbers, and only once: a data
        set may read a stream that cannot start over.
        """
        assert self._device is not None
        first: list[Any] = []

        def read() -> str:
            with drawn_from("first rows", self.epoch):
                first.extend(islice(samples, self.batch_size * self.ranks))
            return digest_of_rows(first)

        refuse_other_digest(read, device=self._device)
        self._device = None
        return first

    def samples(self, position: int) -> int | None:
        """Return None, because the rows of a batch tell how many samples it has."""
        return None

    def present(self, position: int) -> int:
        """How many ranks have a batch of their own at a position of the epoch that was read."""
        return self._last[1] if self._last is not None and position == self._last[0] else self.ranks

    @property
    def present_last(self) -> int:
        """How many have at the last position of an epoch that was read to its end."""
        return self._last[1] if self._last is not None else self.ranks


def is_of_datasets(data: Any) -> bool:
    """Return whether a data set is one of `datasets`, which starts over whenever it is read."""
    return type(data).__module__.partition(".")[0] == "datasets"
