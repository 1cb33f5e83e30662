"""Rule by which a dimension is split between the ranks of a group.

All of Plait uses the rule of `torch.chunk`, as `fully_shard` and DTensor do.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def shard_size(length: Any, ranks: Any) -> Any:
    """Return ceil(length / ranks): the largest shard, and the size to which shards are padded.

    Arguments are integers or arrays of integers.
    """
    return -(-length // ranks)


def shard_length(length: Any, ranks: Any, rank: Any) -> Any:
    """Return the length of the shard of `rank`.

    It is `shard_size` for the first ranks, the remainder for the next rank, and 0 for later ranks.
    Arguments are integers or arrays of integers.
    """
    size = shard_size(length, ranks)
    remainder = length - rank * size
    if isinstance(remainder, int):
        return max(0, min(size, remainder))
    return np.clip(remainder, 0, size)


def shard_lengths(length: int, ranks: int) -> list[int]:
    """Return the lengths of the shards of all ranks."""
    return [shard_length(length, ranks, rank) for rank in range(ranks)]
