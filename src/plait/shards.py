"""How a length is split between the ranks of a group, everywhere in Plait: torch.chunk's rule, that
of `fully_shard` and DTensor too.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def shard_size(length: Any, ranks: Any) -> Any:
    """ceil(length / ranks): the largest part, and what a padded one is stored and sent as.
    Integers, or arrays of them.
    """
    return -(-length // ranks)


def shard_length(length: Any, ranks: Any, rank: Any) -> Any:
    """The part of `rank`: `shard_size` for the first ranks, what is left for the next one, 0 for
    the rest. Integers, or arrays of them.
    """
    size = shard_size(length, ranks)
    left = length - rank * size
    return max(0, min(size, left)) if isinstance(left, int) else np.clip(left, 0, size)


def shard_lengths(length: int, ranks: int) -> list[int]:
    """The parts of all ranks."""
    return [shard_length(length, ranks, rank) for rank in range(ranks)]
