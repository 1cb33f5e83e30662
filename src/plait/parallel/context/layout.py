"""Tokens of a sequence that each rank of the cp axis has, and cutting and joining of tensors.

A sequence is padded at its end to equal chunks. With one chunk per rank, rank r has the r-th chunk.
With two (zigzag), it has the r-th from the front and the r-th from the end: a token sees the tokens
before it, so every rank then has the same amount of attention to compute. This module knows nothing
else about attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a rank.

    Attributes:
        local_start: Index of the first token in the rank's part.
        start: Position of the first token in the padded sequence.
        size: Number of tokens.
    """

    local_start: int
    start: int
    size: int


@dataclass(frozen=True)
class VisibleBlock:
    """Smallest rectangle of this rank's queries and another rank's keys with all visible pairs.

    Attributes:
        first_query: Index of the first query in this rank's part. The block extends to the last
            query.
        keys: Number of keys, counted from the first key of the other rank.
    """

    first_query: int
    keys: int


@dataclass(frozen=True)
class SequenceLayout:
    """Distribution of the chunks of a sequence over the ranks of an axis.

    Attributes:
        ranks: Number of ranks.
        rank: This rank.
        zigzag: Whether a rank has two chunks, from both ends of the sequence; otherwise one.
    """

    ranks: int
    rank: int
    zigzag: bool

    @property
    def per_rank(self) -> int:
        """Number of chunks per rank."""
        return 2 if self.zigzag else 1

    @property
    def count(self) -> int:
        """Number of chunks of a sequence."""
        return self.ranks * self.per_rank

    def padded(self, length: int) -> int:
        """Return the length of a sequence with its padding."""
        return -(-length // self.count) * self.count

    def indices(self, rank: int) -> tuple[int, ...]:
        """Return the chunks of a rank by their index in the sequence."""
        return (rank, self.count - 1 - rank) if self.zigzag else (rank,)

    def chunks(self, part: int, rank: int | None = None) -> tuple[Chunk, ...]:
        """Return the chunks of a rank, by default of this one, that has `part` tokens."""
        if rank is None:
            rank = self.rank
        size = part // self.per_rank
        return tuple(
            Chunk(local_start=local * size, start=index * size, size=size)
            for local, index in enumerate(self.indices(rank))
        )

    def block(self, part: int, source: int) -> VisibleBlock | None:
        """Return the visible pairs with the keys of `source` if only the order of tokens matters.

        With two chunks per rank, the first chunk of an earlier rank is before both chunks of this
        rank, and its second chunk is after them. Both chunks of a later rank are between the chunks
        of this rank. The block is therefore fully visible, or causal if `source` is this rank.

        Args:
            part: Number of tokens of a part.
            source: The rank that has the keys.

        Returns:
            The block, or None if no query sees a key.
        """
        if source == self.rank:
            return VisibleBlock(0, part)
        if source < self.rank:
            return VisibleBlock(0, part // self.per_rank)
        if not self.zigzag:
            return None
        return VisibleBlock(part // 2, part)

    def cut(self, sequence: torch.Tensor, *, dim: int, fill: int = 0) -> torch.Tensor:
        """Return this rank's part of a tensor.

        Args:
            sequence: Tensor of all tokens.
            dim: Dimension of the tokens.
            fill: Value of the padding.

        Returns:
            A contiguous tensor.
        """
        length = sequence.shape[dim]
        missing = self.padded(length) - length
        if missing:
            # `pad` counts dimensions from the last one.
            later_dims = sequence.ndim - 1 - dim
            sequence = F.pad(sequence, (0, 0) * later_dims + (0, missing), value=fill)
        size = sequence.shape[dim] // self.count
        chunks = [sequence.narrow(dim, index * size, size) for index in self.indices(self.rank)]
        return torch.cat(chunks, dim).contiguous()

    def join(self, parts: Iterable[torch.Tensor], *, dim: int) -> torch.Tensor:
        """Return the padded sequence from the parts of all ranks, in the order of the ranks."""
        chunks: dict[int, torch.Tensor] = {}
        for rank, part in enumerate(parts):
            chunks.update(zip(self.indices(rank), part.chunk(self.per_rank, dim), strict=True))
        return torch.cat([chunks[index] for index in range(self.count)], dim)

    def stacked(self, sequence: torch.Tensor, *, dim: int) -> torch.Tensor:
        """Return the parts of all ranks, concatenated in the first dimension.

        This is the inverse of `join`.

        Args:
            sequence: The padded sequence.
            dim: Dimension of its tokens.
        """
        chunks = sequence.chunk(self.count, dim)
        rank_order = [index for rank in range(self.ranks) for index in self.indices(rank)]
        in_order = torch.cat([chunks[index] for index in rank_order], dim)
        # [..., ranks * part, ...] to [ranks * first dimension, ..., part, ...]
        return in_order.unflatten(dim, (self.ranks, -1)).movedim(dim, 0).flatten(0, 1).contiguous()
