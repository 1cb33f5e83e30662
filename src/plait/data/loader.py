"""Loader that chooses the sequences of a batch as a pure function of the position in the run.

The position is the number of sequences that the run has consumed on all ranks. It determines the
epoch, the order inside the epoch and the slice of each data-parallel rank, so the loader has no
state that a checkpoint must contain. A global batch holds the same sequences on any number of
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from plait.data.cache import digest
from plait.data.packing import Array, SequenceSource
from plait.hashing import mix_bits

_FEISTEL_ROUNDS = 6


def shuffle_positions(positions: Array, *, count: int, key: str) -> Array:
    """Apply a pseudo-random permutation of `count` items to some positions.

    The permutation is a Feistel network that is iterated until its result is below `count` (Black
    and Rogaway, "Ciphers with arbitrary finite domains", 2002). Every position of every epoch costs
    the same, no memory proportional to the data is needed, and the order does not depend on the
    version of a random generator.

    Args:
        positions: Integers in [0, count).
        count: Number of items.
        key: Text that selects the permutation.

    Returns:
        int64 array with the shape of `positions`.
    """
    # Two halves of equal width, which together have at least the bits of `count - 1`.
    half_bits = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    round_keys = [
        np.uint64(int(digest([key, str(number)])[:16], 16)) for number in range(_FEISTEL_ROUNDS)
    ]

    values = positions.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left = values[outside] >> half_bits
        right = values[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (mix_bits(right ^ round_key) & mask)
        values[outside] = (left << half_bits) | right
        # Only the results that are not positions are permuted again.
        outside = values >= np.uint64(count)
    return values.astype(np.int64)


class BatchSource(Protocol):
    """Training batches of one data-parallel rank, addressed by the position in the run."""

    @property
    def batch(self) -> int:
        """Number of sequences in one optimizer step over all ranks."""

    @property
    def length(self) -> int:
        """Number of tokens in a sequence."""

    def at(self, position: int) -> dict[str, torch.Tensor]:
        """Return this rank's share of the batch at `position`."""

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint contains besides the position."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned."""


@dataclass(frozen=True)
class Loader:
    """Training batches of one data-parallel rank from prepared sequences."""

    sequences: SequenceSource
    batch: int
    """Number of sequences in one optimizer step over all ranks."""
    seed: int
    dp_rank: int = 0
    dp_size: int = 1

    @property
    def length(self) -> int:
        """Number of tokens in a sequence."""
        return self.sequences.length

    def global_numbers(self, position: int) -> Array:
        """Return the numbers of the sequences in the global batch at `position`: int64 [batch].

        Every epoch contains each sequence once.
        """
        count = len(self.sequences)
        positions = np.arange(position, position + self.batch)
        numbers = np.empty(self.batch, dtype=np.int64)
        # A batch can cross the end of an epoch, and each epoch has another order.
        for epoch in np.unique(positions // count):
            in_epoch = positions // count == epoch
            numbers[in_epoch] = shuffle_positions(
                positions[in_epoch] % count, count=count, key=f"{self.seed} {epoch}"
            )
        return numbers

    def at(self, position: int) -> dict[str, torch.Tensor]:
        """Return this rank's share of the batch at `position`.

        Returns:
            The tensors of `sequences.take`, each int64 [batch / dp_size, length].
        """
        share = self.batch // self.dp_size
        numbers = self.global_numbers(position)
        return self.sequences.take(numbers[self.dp_rank * share : (self.dp_rank + 1) * share])

    def state(self) -> dict[str, Any]:
        """Return an empty state: the position determines the batches."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the position determines the batches."""


def validation_batches(
    sequences: SequenceSource, *, limit: int, micro: int, dp_rank: int, dp_size: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the validation batches of one data-parallel rank.

    The validated sequences do not depend on `micro` or the number of ranks. Every rank receives the
    same number of batches, because their forwards are collective. The last batches are filled with
    padding, whose weight is 0.

    Args:
        sequences: Sequences of the validation text.
        limit: Maximum number of sequences. They are spread evenly over the text.
        micro: Sequences per batch of a rank.
        dp_rank: Index of this rank among the data-parallel ranks.
        dp_size: Number of data-parallel ranks.
    """
    count = min(limit, len(sequences))
    numbers = (np.arange(count) * len(sequences)) // max(count, 1)
    global_batch = micro * dp_size
    padded = np.concatenate([numbers, np.full(-count % global_batch, -1, dtype=np.int64)])
    for start in range(0, len(padded), global_batch):
        yield sequences.take(padded[start + dp_rank * micro : start + (dp_rank + 1) * micro])
