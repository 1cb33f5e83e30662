"""A hash of tensors that is equal on every layout, and that ranks compute of the parts they hold:
128 bits, a sum over all elements.

A tensor is seen as rows, its last dimension, of words of at most 4 bytes (signed, little-endian).
To the sum modulo 2^64 of each of two lanes a word adds

    value x key(columns, place in its row) x key(rows of the lane, index of its row among all rows
    of the tensor)

and each tensor adds a number of its own, so that one of zeros counts. The keys are odd and follow
from the tensor's name, dtype and shape; so an element that changes, moves, is missing or is counted
twice changes the sum. Padding has no index and is not in it. The hash finds mistakes; it does not
withstand an attacker, who chooses the sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from plait.checkpoint.windows import TensorRecord, Window

Keys = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_STEP, _FIRST, _SECOND = (
    np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_AT_ONCE = 1 << 17
"""Words that are multiplied at a time, so that they stay in a core's cache."""
_PIECE = 16 << 20
"""Bytes."""
Observer = Callable[["Piece"], None]


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that lies in one stretch of memory: several of its rows, or a part of
    one.
    """

    name: str
    row: int
    """The first one, of the tensor that it is cut from."""
    column: int
    block: torch.Tensor
    """(rows, columns), on the CPU."""

    @property
    def raw(self) -> memoryview:
        """Its bytes."""
        return memoryview(self.block.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def pieces(name: str, tensor: torch.Tensor) -> Iterator[Piece]:
    """A plain tensor, wherever it is, in the order of its elements."""
    tensor = tensor.detach()
    if not tensor.numel():
        return
    rows = tensor.contiguous().reshape(-1, tensor.shape[-1] if tensor.ndim else 1)
    columns = max(1, _PIECE // tensor.element_size())
    count = max(1, columns // rows.shape[1])
    for row in range(0, rows.shape[0], count):
        for column in range(0, rows.shape[1], columns):
            yield Piece(name, row, column, rows[row : row + count, column : column + columns].cpu())


class ContentHash:
    """A sum that parts of tensors are added to."""

    def __init__(self) -> None:
        self._lanes = np.zeros(2, dtype="<u8")

    def __bytes__(self) -> bytes:
        """16 bytes."""
        return self._lanes.tobytes()

    def __str__(self) -> str:
        return bytes(self).hex()

    def add(self, total: bytes) -> None:
        """The sum of another rank."""
        self._lanes += np.frombuffer(total, dtype="<u8")

    def observer(
        self, name: str, record: TensorRecord, window: Window, *, begins: bool
    ) -> Observer:
        """What adds the pieces of one tensor, which are of the part `window` of it. `begins`: this
        part is the first, and brings the tensor's own number.
        """
        own, row_seeds, column_seed = _seeds(name, record)
        if begins:
            self._lanes += own
        starts, sizes = ([part[which] for part in window] or [which] for which in (0, 1))
        shape = list(record.shape) or [1]
        columns: dict[tuple[int, int], torch.Tensor] = {}

        def add(piece: Piece) -> None:
            words = piece.block.view(_WORDS[piece.block.element_size()])
            each = words.shape[1] // piece.block.shape[1]
            place = ((starts[-1] + piece.column) * each, words.shape[1])
            if place not in columns:
                columns.clear()
                columns[place] = torch.from_numpy(
                    _keys(column_seed, np.arange(place[0], sum(place), dtype=np.uint64)).view(
                        np.int64
                    )
                )
            sums = _sums(words, columns[place]).numpy().view(np.uint64)
            rows = _places(piece.row, words.shape[0], sizes[:-1], starts[:-1], shape[:-1])
            self._lanes += np.stack(
                [(_keys(seed, rows) * sums).sum(dtype=np.uint64) for seed in row_seeds]
            )

        return add


def _seeds(name: str, record: TensorRecord) -> tuple[Keys, Keys, np.uint64]:
    """(the tensor's own numbers, of the lanes' rows, of columns)."""
    said = f"{name}\0{record.dtype}\0{','.join(map(str, record.shape))}".encode()
    found = np.frombuffer(hashlib.blake2b(said, digest_size=40).digest(), dtype="<u8")
    return found[:2], found[2:4], found[4]


def _keys(seed: np.uint64, places: Keys) -> Keys:
    """Odd numbers without a pattern: SplitMix64."""
    mixed = places * _STEP + seed
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


def _sums(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Of every row of (rows, columns) the sum of its words times their keys, modulo 2^64 as
    int64.
    """
    rows, columns = words.shape
    found = torch.zeros(rows, dtype=torch.int64)
    count = max(1, _AT_ONCE // columns)
    for row in range(0, rows, count):
        for column in range(0, columns, _AT_ONCE):
            here = words[row : row + count, column : column + _AT_ONCE]
            found[row : row + count] += (
                here.to(torch.int64).mul_(keys[column : column + _AT_ONCE]).sum(dim=1)
            )
    return found


def _places(first: int, count: int, sizes: list[int], starts: list[int], shape: list[int]) -> Keys:
    """The indices that rows of a part have among all rows of the tensor."""
    here = np.arange(first, first + count, dtype=np.int64)
    if sizes == shape:
        return here.astype(np.uint64)
    found = np.zeros(count, dtype=np.int64)
    stride = 1
    for size, start, full in zip(reversed(sizes), reversed(starts), reversed(shape), strict=True):
        here, inner = np.divmod(here, size)
        found += (inner + start) * stride
        stride *= full
    return found.astype(np.uint64)
