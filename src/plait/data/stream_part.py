"""Data-parallel rank's part of an iterable data set, whose length may be unknown.

Batches are formed as a single process forms them, and distributed in rounds of one batch per rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from plait.data.draws import seeded_generators
from plait.data.split_rows import digest_of_rows, refuse_differing_digest


class StreamPart(IterableDataset[Any]):
    """Rank's part of an iterable data set that every rank reads in full."""

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
                Otherwise a rank without a batch gets the batch of another rank.
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
        """Number of samples, over all ranks, that the next pass reads and leaves out."""
        self._last_round: tuple[int, int] | None = None
        """Number of the last round, and of the ranks that have a batch in it, if not all have."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch. Shuffled data sets have another order in every epoch."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        samples = len(self.dataset)
        samples_per_round = self.batch_size * self.ranks
        if self.drop_last:
            return (samples // samples_per_round) * self.batch_size
        return math.ceil(samples / samples_per_round) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        self._last_round = None
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)

        size = self.batch_size
        round_number = 0
        round_samples: list[Any] = []
        samples: Iterator[Any] = islice(self.dataset, self.skipped, None)
        if self._device is not None and get_worker_info() is None:
            samples = chain(self._compare_first_round(samples), samples)
        for sample in samples:
            round_samples.append(sample)
            if len(round_samples) == size * self.ranks:
                yield from round_samples[self.index * size : (self.index + 1) * size]
                round_samples = []
                round_number += 1

        if not round_samples or self.drop_last:
            return
        if self.ranks > 1 and (self.repeats or get_worker_info() is not None):
            # The training process cannot read `_last_round` from a worker, so samples are repeated
            # as Accelerate does.
            filled = round_samples * math.ceil(size * self.ranks / len(round_samples))
            yield from filled[self.index * size : (self.index + 1) * size]
            return
        self._last_round = round_number, math.ceil(len(round_samples) / size)
        # A rank without samples gets the first batch, because steps are collective.
        batch = round_samples[self.index * size : (self.index + 1) * size]
        yield from batch or round_samples[:size]

    def _compare_first_round(self, samples: Iterator[Any]) -> list[Any]:
        """Return the samples of the first round after comparing them between ranks.

        Collective over all ranks. They are read with the same random numbers, and only once: a data
        set may read a stream that cannot start over.
        """
        assert self._device is not None
        first_round: list[Any] = []

        def read() -> str:
            with seeded_generators("first rows", self.epoch):
                first_round.extend(islice(samples, self.batch_size * self.ranks))
            return digest_of_rows(first_round)

        refuse_differing_digest(read, device=self._device)
        # Once is enough: later epochs read the same data set.
        self._device = None
        return first_round

    def samples(self, position: int) -> int | None:
        """Return None: the number of samples of a batch is the number of its rows."""
        return None

    def present(self, position: int) -> int:
        """Return how many ranks have a batch of their own at a position of the current epoch."""
        if self._last_round is not None and position == self._last_round[0]:
            return self._last_round[1]
        return self.ranks

    @property
    def present_last(self) -> int:
        """Number of ranks with a batch of their own at the end of an epoch that was read."""
        return self._last_round[1] if self._last_round is not None else self.ranks


def is_datasets_library(data: Any) -> bool:
    """Return True for a data set of the library `datasets`, which restarts whenever it is read."""
    return type(data).__module__.partition(".")[0] == "datasets"
