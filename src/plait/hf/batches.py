"""Batches of a data-parallel rank, such that every sample counts once.

Note [Rounds of batches]
    Batches are formed as in a single process, and distributed in rounds of one batch per rank. In
    the last round there may be fewer batches than ranks. Collectives need all ranks, so the ranks
    without a batch repeat the batch of another rank. The repeated batch adds nothing to the loss,
    the gradients or the metrics. Accelerate repeats samples instead, which then count twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from plait.data.split_rows import (
    RoundPlan,
    digest_of_rows,
    refuse_differing_digest,
    seeded_generators,
)


class Rounds(RoundPlan):
    """Batch sampler of one rank over the batch sampler of all ranks. See Note [Rounds of batches].

    Args:
        batch_sampler: Sampler that yields the batches of all ranks, in the same order on every
            rank.
        ranks: Number of data-parallel ranks.
        index: This rank's index among them.
        drop_last: Whether the last round is left out if it has fewer batches than there are ranks.
        device: Device of the collective that compares the order of a user's own sampler between the
            ranks. None: no comparison.
        seed: Seed of the global generators while a user's own sampler draws its order. None
            leaves them as they are.
    """

    def __init__(
        self,
        batch_sampler: Any,
        *,
        ranks: int,
        index: int,
        drop_last: bool,
        device: torch.device | None = None,
        seed: int | None = None,
    ) -> None:
        self._device: torch.device | None = None
        self._seed: int | None = None
        # Other samplers yield the same order on every rank.
        if _is_of_user(batch_sampler):
            self._device = device
            self._seed = seed
        self._epoch = 0
        self.batch_sampler = batch_sampler
        self.ranks = ranks
        self.index = index
        self.drop_last = drop_last
        self.num_processes = ranks  # Accelerate's name of `ranks`.
        self._samples: list[int] = []
        """Number of samples of each batch so far."""

    @property
    def batch_size(self) -> int:
        """Number of samples per batch."""
        return int(getattr(self.batch_sampler, "batch_size", 1) or 1)

    @property
    def sampler(self) -> Any:
        """Sampler that determines the order of the samples."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order."""
        self._epoch = epoch
        for source in (self.batch_sampler, self.sampler):
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        if self.drop_last:
            return batches // self.ranks
        return math.ceil(batches / self.ranks)

    def __iter__(self) -> Iterator[Any]:
        self._last_round = None
        self._samples = []
        dealt: list[Any] = []
        position = 0
        batches = iter(self.batch_sampler)
        while (batch := self._draw(batches, position, len(dealt))) is not None:
            dealt.append(batch)
            if len(dealt) == self.ranks:
                self._compare(dealt)
                self._samples.append(len(dealt[self.index]))
                yield dealt[self.index]
                dealt = []
                position += 1

        # See Note [Rounds of batches].
        if dealt and not self.drop_last:
            self._compare(dealt)
            self._last_round = (position, len(dealt))
            last = dealt[min(self.index, len(dealt) - 1)]
            self._samples.append(len(last))
            yield last

    def _draw(self, batches: Iterator[Any], *place: int) -> Any:
        """Return the indices of the next batch, or None at the end.

        Every rank draws the indices with the same random numbers.
        """
        if self._seed is None:
            return next(batches, None)
        with seeded_generators("order", self._seed, self._epoch, *place):
            return next(batches, None)

    def _compare(self, dealt: list[Any]) -> None:
        """Raise InputError if the order differs between ranks. Only the first call compares.

        The first call is collective.
        """
        if self._device is None:
            return
        device = self._device
        self._device = None
        count = len(self.batch_sampler) if hasattr(self.batch_sampler, "__len__") else None
        refuse_differing_digest(lambda: digest_of_rows([count, *dealt]), device=device)

    def samples(self, position: int) -> int | None:
        """Return this rank's number of samples at a position. See `RoundPlan.samples`."""
        return self._samples[position] if position < len(self._samples) else None


class OwnRounds(Rounds):
    """Batch sampler of one rank over a batch sampler that yields only this rank's batches.

    Every rank has the same number of batches.
    """

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        self._samples = []
        for batch in self.batch_sampler:
            self._samples.append(len(batch))
            yield batch


class EpochOrder:
    """Sampler with a generator that is seeded by the epoch.

    Every rank and every resumed run draws the same order.

    Args:
        sampler: A sampler with a `generator`.
        seed: Seed of the order.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order."""
        self._epoch = epoch
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self._sampler.generator = torch.Generator().manual_seed(self._seed + self._epoch)
        yield from self._sampler


_SAMPLERS = ("torch", "accelerate", "transformers", "trl", "plait")
"""Packages whose samplers yield the same order on every rank."""


def _is_of_user(batch_sampler: Any) -> bool:
    """Return True if a class that is not in `_SAMPLERS` determines the order."""
    return any(
        type(source).__module__.partition(".")[0] not in _SAMPLERS
        for source in (batch_sampler, getattr(batch_sampler, "sampler", None))
        if source is not None
    )


def plan_of(loader: Any) -> RoundPlan | None:
    """Return the `RoundPlan` of a loader, or None for a loader that Plait did not create."""
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, RoundPlan):
        return dataset
    sampler = getattr(loader, "batch_sampler", None)
    # The sampler that skips the batches of a resumed epoch wraps it.
    while sampler is not None and not isinstance(sampler, RoundPlan):
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler
