"""Which sequences are in which batch, as a pure function of the position in the run.

The position is the number of sequences that the run has consumed on all ranks. From it follow the
epoch, the order inside the epoch and the slice of each data-parallel rank, so there is no state to
save and none to lose. A global batch holds the same sequences on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from plait.data.cache import digest
from plait.data.packing import Array, Cut

_ROUNDS = 6


def shuffled(positions: Array, *, count: int, key: str) -> Array:
    """Where a shuffle of `count` items, one for each `key`, puts `positions`: int64, each in 0 to
    count - 1, a bijection.

    A Feistel network iterated until it lands inside (Black and Rogaway, "Ciphers with arbitrary
    finite domains", 2002): any position of any epoch costs the same, nothing of the size of the
    data is held, and the order does not depend on the version of a random generator.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(int(digest([key, str(number)])[:16], 16)) for number in range(_ROUNDS)]
    found = positions.astype(np.uint64)
    outside = np.ones(len(found), dtype=bool)
    while outside.any():
        left = found[outside] >> half
        right = found[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (_mixed(right ^ round_key) & mask)
        found[outside] = (left << half) | right
        outside = found >= np.uint64(count)
    return found.astype(np.int64)


def _mixed(value: Any) -> Any:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014), modulo 2**64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class Batches(Protocol):
    """Training batches of one data-parallel rank, by their position."""

    @property
    def batch(self) -> int:
        """Sequences in one optimizer step over all ranks."""

    @property
    def length(self) -> int:
        """Tokens of a sequence."""

    def at(self, position: int) -> dict[str, torch.Tensor]:
        """This rank's share of the step at `position`."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the position."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


@dataclass(frozen=True)
class Loader:
    """Training batches of one data-parallel rank."""

    sequences: Cut
    batch: int
    """Sequences in one optimizer step over all ranks."""
    seed: int
    dp_rank: int = 0
    dp_size: int = 1

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.sequences.length

    def global_numbers(self, position: int) -> Array:
        """Which sequences the step at `position` takes, over all ranks: int64 [batch]. Every epoch
        takes each sequence once.
        """
        count = len(self.sequences)
        at = np.arange(position, position + self.batch)
        found = np.empty(self.batch, dtype=np.int64)
        for epoch in np.unique(at // count):
            here = at // count == epoch
            found[here] = shuffled(at[here] % count, count=count, key=f"{self.seed} {epoch}")
        return found

    def at(self, position: int) -> dict[str, torch.Tensor]:
        """This rank's share of that step: what `sequences` gives, int64 [batch / dp_size, length]
        each.
        """
        share = self.batch // self.dp_size
        return self.sequences.take(
            self.global_numbers(position)[self.dp_rank * share : (self.dp_rank + 1) * share]
        )

    def state(self) -> dict[str, Any]:
        """Nothing: the position says it."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to do."""


def validation_batches(
    sequences: Cut, *, limit: int, micro: int, dp_rank: int, dp_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """At most `limit` sequences, spread evenly over the text, in batches of `micro` for each rank.

    The set does not depend on `micro` or the ranks. Every rank gets the same number of batches;
    what is missing is padding that weighs 0.
    """
    count = min(limit, len(sequences))
    numbers = (np.arange(count) * len(sequences)) // max(count, 1)
    together = micro * dp_size
    padded = np.concatenate([numbers, np.full(-count % together, -1, dtype=np.int64)])
    for start in range(0, len(padded), together):
        yield sequences.take(padded[start + dp_rank * micro : start + (dp_rank + 1) * micro])
