"""Which tokens of a sequence a rank of the cp axis has, and how what is [batch, seq, ...] is cut
and put together again.

A sequence is padded at its end to equal chunks. With one chunk a rank, rank r has the r-th. With
two (zigzag) it has the r-th from the front and the r-th from the end: a token sees the tokens
before it, so every rank then has equally much attention to compute. Nothing here knows what
attention is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens that a rank has."""

    local: int
    """Where they begin in the rank's part."""
    at: int
    """Where they begin in the padded sequence."""
    size: int


@dataclass(frozen=True)
class VisibleBlock:
    """Smallest rectangle of this rank's queries and another rank's keys that holds every visible
    pair.
    """

    first_query: int
    """Index of its first query in this rank's part. The block extends to the last query."""
    keys: int
    """Number of its keys, counted from the first key of the other rank."""


@dataclass(frozen=True)
class SequenceLayout:
    """Chunks of a sequence over the ranks of an axis."""

    ranks: int
    rank: int
    zigzag: bool
    """Two chunks a rank, from both ends; otherwise one."""

    @property
    def per_rank(self) -> int:
        """Chunks of a rank."""
        return 2 if self.zigzag else 1

    @property
    def count(self) -> int:
        """Chunks of a sequence."""
        return self.ranks * self.per_rank

    def padded(self, length: int) -> int:
        """Tokens of a sequence of `length` with what is added to its end."""
        return -(-length // self.count) * self.count

    def indices(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, by their place in the sequence."""
        return (rank, self.count - 1 - rank) if self.zigzag else (rank,)

    def chunks(self, part: int, rank: int | None = None) -> tuple[Chunk, ...]:
        """The chunks of a rank, by default of this one, whose part has `part` tokens."""
        size = part // self.per_rank
        held = self.indices(self.rank if rank is None else rank)
        return tuple(Chunk(local * size, index * size, size) for local, index in enumerate(held))

    def block(self, part: int, source: int) -> VisibleBlock | None:
        """Return the block of this rank's queries and the keys of `source` if only token order
        matters.

        With two chunks per rank, the first chunk of an earlier rank is before both chunks of this
        rank, and its second chunk is after them. Both chunks of a later rank are between the chunks
        of this rank. The block is therefore fully visible, or causal if `source` is this rank.

        Args:
            part: Tokens of a part.
            source: The rank that has the keys.

        Returns:
            The block, or None if no query sees a key.
        """
        if source == self.rank:
            return VisibleBlock(0, part)
        if source < self.rank:
            return VisibleBlock(0, part // self.per_rank)
        return VisibleBlock(part // 2, part) if self.zigzag else None

    def cut(self, whole: torch.Tensor, *, dim: int, fill: int = 0) -> torch.Tensor:
        """This rank's part of `whole`, contiguous; `fill` is what a sequence is padded with."""
        length = whole.shape[dim]
        missing = self.padded(length) - length
        if missing:
            whole = F.pad(whole, (0, 0) * (whole.ndim - 1 - dim) + (0, missing), value=fill)
        size = whole.shape[dim] // self.count
        return torch.cat(
            [whole.narrow(dim, index * size, size) for index in self.indices(self.rank)], dim
        ).contiguous()

    def join(self, parts: Iterable[torch.Tensor], *, dim: int) -> torch.Tensor:
        """The padded sequence from the parts of all ranks, in their order."""
        chunks = {
            index: piece
            for rank, part in enumerate(parts)
            for index, piece in zip(self.indices(rank), part.chunk(self.per_rank, dim), strict=True)
        }
        return torch.cat([chunks[index] for index in range(self.count)], dim)

    def stacked(self, whole: torch.Tensor, *, dim: int) -> torch.Tensor:
        """Return the parts of all ranks, concatenated in the first dimension. This is the inverse
        of `join`.

        Args:
            whole: The padded sequence.
            dim: The dimension of its tokens.
        """
        chunks = whole.chunk(self.count, dim)
        in_order = torch.cat(
            [chunks[index] for rank in range(self.ranks) for index in self.indices(rank)], dim
        )
        return in_order.unflatten(dim, (self.ranks, -1)).movedim(dim, 0).flatten(0, 1).contiguous()
