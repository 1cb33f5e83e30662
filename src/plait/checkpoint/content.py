"""Hash of tensors that is equal on every layout of ranks.

Each rank hashes the shards it has, and the sum of the ranks' hashes (128 bits) is the hash of the
checkpoint.

Note [Content hash]
    A tensor is treated as rows along its last dimension. A row consists of signed, little-endian
    words of at most 4 bytes. The hash has two lanes, each a sum modulo 2^64. Every word adds

        value * key(column of the word) * row_key(lane, index of its row in the full tensor)

    to each lane. Every tensor also adds a number that depends on its identity, so that a tensor of
    zeros counts. The keys are odd and depend on name, dtype and shape of the tensor. An element
    that changes, moves, is missing or is counted twice therefore changes the sum. Padding has no
    index and is not hashed. The hash detects mistakes. It does not withstand an attacker, who can
    construct tensors with any sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from plait.checkpoint.windows import TensorRecord, Window
from plait.hashing import GOLDEN_RATIO, mix_bits

Keys = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
_WORD_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_WORDS_AT_ONCE = 1 << 17
"""Words that are multiplied at a time, so that they stay in a core's cache."""
_BLOCK_BYTES = 16 << 20
Observer = Callable[["TensorBlock"], None]
"""Function that receives each block of a tensor, for example to hash it."""


@dataclass(frozen=True)
class TensorBlock:
    """Contiguous part of a tensor: several of its rows, or a part of one row."""

    name: str
    row: int
    """Index of the first row in the local tensor."""
    column: int
    block: torch.Tensor
    """Elements on the CPU, of shape [rows, columns]."""

    @property
    def raw(self) -> memoryview:
        """Bytes of the block."""
        return memoryview(self.block.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def tensor_blocks(name: str, tensor: torch.Tensor) -> Iterator[TensorBlock]:
    """Copy a plain tensor to the CPU in blocks of at most 16 MiB, in the order of its elements."""
    tensor = tensor.detach()
    if not tensor.numel():
        return
    columns_per_row = tensor.shape[-1] if tensor.ndim else 1
    rows = tensor.contiguous().reshape(-1, columns_per_row)
    columns = max(1, _BLOCK_BYTES // tensor.element_size())
    count = max(1, columns // columns_per_row)
    for row in range(0, rows.shape[0], count):
        for column in range(0, columns_per_row, columns):
            block = rows[row : row + count, column : column + columns].cpu()
            yield TensorBlock(name, row, column, block)


class ContentHash:
    """Hash of the tensor blocks added so far. See Note [Content hash]."""

    def __init__(self) -> None:
        self._lanes = np.zeros(2, dtype="<u8")

    def __bytes__(self) -> bytes:
        return self._lanes.tobytes()

    def __str__(self) -> str:
        return bytes(self).hex()

    def add(self, total: bytes) -> None:
        """Add the hash of another rank (16 bytes)."""
        self._lanes += np.frombuffer(total, dtype="<u8")

    def observer(
        self, name: str, record: TensorRecord, window: Window, *, begins: bool
    ) -> Observer:
        """Return a function that adds blocks of one tensor to the hash.

        Args:
            name: Name of the tensor in the checkpoint.
            record: Record of the full tensor.
            window: Part of the full tensor that the blocks are taken from.
            begins: Whether this is the tensor's first part, which also adds the tensor's number.
        """
        tensor_numbers, row_seeds, column_seed = _seeds(name, record)
        if begins:
            self._lanes += tensor_numbers
        # A scalar is one row with one column.
        starts = [start for start, _ in window] or [0]
        sizes = [size for _, size in window] or [1]
        shape = list(record.shape) or [1]
        # Column keys of the last block. Blocks of full rows all use the same ones.
        column_keys: dict[tuple[int, int], torch.Tensor] = {}

        def add(block: TensorBlock) -> None:
            words = block.block.view(_WORD_DTYPES[block.block.element_size()])  # [rows, words]
            words_per_element = words.shape[1] // block.block.shape[1]
            first_word = (starts[-1] + block.column) * words_per_element
            columns = (first_word, words.shape[1])
            if columns not in column_keys:
                column_keys.clear()
                indices = np.arange(first_word, sum(columns), dtype=np.uint64)
                keys = _keys(column_seed, indices).view(np.int64)
                column_keys[columns] = torch.from_numpy(keys)
            row_sums = _row_sums(words, column_keys[columns]).numpy().view(np.uint64)
            rows = _row_indices(block.row, words.shape[0], sizes[:-1], starts[:-1], shape[:-1])
            self._lanes += np.stack(
                [(_keys(seed, rows) * row_sums).sum(dtype=np.uint64) for seed in row_seeds]
            )

        return add


def _seeds(name: str, record: TensorRecord) -> tuple[Keys, Keys, np.uint64]:
    """Return a tensor's number and row seed per lane, and the seed of its column keys."""
    identity = f"{name}\0{record.dtype}\0{','.join(map(str, record.shape))}".encode()
    seeds = np.frombuffer(hashlib.blake2b(identity, digest_size=40).digest(), dtype="<u8")
    return seeds[:2], seeds[2:4], seeds[4]


def _keys(seed: np.uint64, indices: Keys) -> Keys:
    """Return odd pseudo-random numbers by SplitMix64."""
    return mix_bits(indices * np.uint64(GOLDEN_RATIO) + seed) | np.uint64(1)


def _row_sums(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the sum of words times keys of each row, modulo 2^64 as int64.

    Args:
        words: Integers of shape [rows, columns].
        keys: int64 keys of the columns.
    """
    rows, columns = words.shape
    sums = torch.zeros(rows, dtype=torch.int64)
    count = max(1, _WORDS_AT_ONCE // columns)
    for row in range(0, rows, count):
        for column in range(0, columns, _WORDS_AT_ONCE):
            block = words[row : row + count, column : column + _WORDS_AT_ONCE]
            products = block.to(torch.int64).mul_(keys[column : column + _WORDS_AT_ONCE])
            sums[row : row + count] += products.sum(dim=1)
    return sums


def _row_indices(
    first: int, count: int, sizes: list[int], starts: list[int], shape: list[int]
) -> Keys:
    """Return the indices among all rows of the full tensor.

    Args:
        first: Index of the first row in the local part.
        count: Number of rows.
        sizes: Lengths of the part, without the last dimension.
        starts: Starts of the part in the full tensor.
        shape: Shape of the full tensor.
    """
    rows = np.arange(first, first + count, dtype=np.int64)
    if sizes == shape:
        return rows.astype(np.uint64)

    indices = np.zeros(count, dtype=np.int64)
    stride = 1
    for size, start, full in zip(reversed(sizes), reversed(starts), reversed(shape), strict=True):
        rows, coordinate = np.divmod(rows, size)
        indices += (coordinate + start) * stride
        stride *= full
    return indices.astype(np.uint64)
