"""Which pieces go together: small ones of two ranks share a buffer, so that a rank sends few messages whatever the tensors are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.inference.weight_sync.route import PIECE, Piece

SMALL = 256 << 10
"""Bytes below which a piece is packed with others: copying it costs less than a message of its own."""
ALIGNMENT = 16
"""Bytes: a multiple of every dtype's size."""


@dataclass(frozen=True)
class Message:
    """Pieces from one rank to one rank."""

    source: int
    target: int
    pieces: tuple[Piece, ...]
    starts: tuple[int, ...]
    """Of each, in bytes."""
    size: int
    """Bytes of all, those between pieces included."""


def messages_of(route: Sequence[Piece]) -> list[Message]:
    """In an order that all ranks share, as the route's is: by the first piece of each."""
    groups: list[list[Piece]] = []
    open_: dict[tuple[int, int], tuple[list[Piece], int]] = {}
    for piece in route:
        pair = piece.source, piece.target
        group, size = open_.get(pair, ([], PIECE))
        if piece.size >= SMALL or size + piece.size > PIECE:
            group, size = [], 0
            groups.append(group)
        group.append(piece)
        if piece.size < SMALL:
            open_[pair] = group, _aligned(size + piece.size)
    return [_message(group) for group in groups]


def _message(pieces: list[Piece]) -> Message:
    starts, end = [], 0
    for piece in pieces:
        starts.append(_aligned(end))
        end = starts[-1] + piece.size
    return Message(pieces[0].source, pieces[0].target, tuple(pieces), tuple(starts), end)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
