"""The part of each tensor that a rank holds, and a content hash that is equal for every layout.

Note [Windows]
    A window describes the part of a tensor that a rank holds: its (start, length) in every
    dimension of the tensor. A tensor is split over mesh dimensions by the rule of torch.chunk, one
    mesh dimension after the other. Over the remaining mesh dimensions it is replicated, and the
    first replica writes it. A small record per tensor is therefore enough to compute the window of
    any rank, and the metadata of a checkpoint does not grow with the world size.

Each rank hashes the shards it has, and the sum of the ranks' hashes (128 bits) is the hash of the
checkpoint.

Note [Content hash]
    A tensor is treated as rows along its last dimension. A row consists of words: signed,
    little-endian integers of at most 4 bytes. The hash has two lanes, each a sum modulo 2^64. Every
    word adds

        value * key(column of the word) * row_key(lane, index of its row in the full tensor)

    to each lane. Every tensor also adds a number that depends on its identity, so that a tensor of
    zeros also changes the hash. The keys are odd and depend on name, dtype and shape of the tensor.
    An element that changes, moves, is missing or is added twice therefore changes the sum. Padding
    has no index and is not hashed. The hash detects mistakes. It does not withstand an attacker,
    who can construct tensors with any sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Self

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, model_validator
from torch.distributed.tensor import DTensor

from plait._torch.tensors import local_window, shard_order
from plait.cluster.layout import AXES, EXPERT_AXES, Layout, shard_length, shard_size
from plait.errors import CheckpointError
from plait.hashing import GOLDEN_RATIO, mix_bits
from plait.parallel.parameter_layout import Reduction
from plait.policy import Policy
from plait.sizes import dtype_name

Window = tuple[tuple[int, int], ...]
"""(start, length) per dimension of a tensor. See Note [Windows]."""
Keys = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
_WORD_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_WORDS_AT_ONCE = 1 << 17
"""Words that are multiplied at a time, so that they stay in a core's cache."""
_BLOCK_BYTES = 16 << 20
Observer = Callable[["TensorBlock"], None]
"""Function that receives each block of a tensor, for example to hash it."""


class TensorRecord(Policy):
    """Shape, dtype and splits of a tensor in a checkpoint."""

    dtype: str
    """Name of the dtype without `torch.`."""
    shape: tuple[NonNegativeInt, ...]
    """Global shape."""
    cuts: tuple[tuple[str, NonNegativeInt], ...] = ()
    """(mesh dimension, tensor dimension) pairs, in the order in which they split the tensor."""
    stages: tuple[NonNegativeInt, ...] = Field((0,), min_length=1)
    """Coordinates along pp of the stages that have it. The first one writes it."""

    @model_validator(mode="after")
    def _cuts_existing_dimensions(self) -> Self:
        for axis, dim in self.cuts:
            if axis not in (*AXES, *EXPERT_AXES) or dim >= len(self.shape):
                raise ValueError(f"{axis} cannot split dimension {dim} of the shape {self.shape}")
        return self

    def window(self, coordinates: Mapping[str, int], degrees: Mapping[str, int]) -> Window:
        """Return the part of the tensor that a rank holds.

        Args:
            coordinates: Coordinates of the rank by mesh dimension.
            degrees: Sizes of the mesh dimensions.
        """
        starts = [0] * len(self.shape)
        sizes = list(self.shape)
        for axis, dim in self.cuts:
            ranks = degrees.get(axis, 1)
            rank = coordinates.get(axis, 0)
            # Ranks behind the end of the tensor have an empty part that starts at its end.
            starts[dim] += min(rank * shard_size(sizes[dim], ranks), sizes[dim])
            sizes[dim] = shard_length(sizes[dim], ranks, rank)
        return tuple(zip(starts, sizes, strict=True))

    def is_written_by(self, coordinates: Mapping[str, int]) -> bool:
        """Return True if the rank at the coordinates writes its part to the checkpoint."""
        axes = tuple(axis for axis, _ in self.cuts)
        return Reduction(axes, stages=self.stages[:1]).is_written_by(coordinates)

    def begins_at(self, coordinates: Mapping[str, int]) -> bool:
        """Return True if the rank at the coordinates has the first part or the full tensor."""
        return all(coordinates.get(axis, 0) == 0 for axis, _ in self.cuts)

    def parts(self, layout: Layout, target: Window) -> Iterator[tuple[int, Window]]:
        """Yield (rank, window that it wrote) for every rank that wrote a part of `target`."""
        axes = list(dict.fromkeys(axis for axis, _ in self.cuts))
        degrees = layout.all_degrees
        for point in product(*(range(degrees.get(axis, 1)) for axis in axes)):
            coordinates = dict.fromkeys(AXES, 0)
            # The tensor was written on its first stage, by the ranks with coordinate 0 on all other
            # axes.
            coordinates["pp"] = self.stages[0]
            coordinates |= dict(zip(axes, point, strict=True))
            window = self.window(coordinates, degrees)
            if overlap(window, target) is not None:
                yield layout.rank(**coordinates), window


def record_of(tensor: torch.Tensor) -> TensorRecord:
    """Return the record of a tensor that is sharded, replicated, or plain.

    Raises:
        ValueError: A DTensor is a partial sum, or its mesh has no names.
    """
    dtype = dtype_name(tensor.dtype)
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return TensorRecord(dtype=dtype, shape=shape)

    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names
    if names is None or any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"a DTensor with the placements {tensor.placements} cannot be saved, because it is a"
            " partial sum or its device mesh has no names of dimensions; redistribute a partial"
            " sum, or create the mesh with mesh_dim_names"
        )
    record = TensorRecord(
        dtype=dtype,
        shape=shape,
        cuts=tuple((names[axis], dim) for axis, dim in shard_order(tensor)),
    )
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    coordinates = dict(zip(names, coordinate, strict=True))
    degrees = dict(zip(names, mesh.shape, strict=True))
    assert record.window(coordinates, degrees) == window_of(tensor), (record, tensor.placements)
    return record


def dtype_of(record: TensorRecord) -> torch.dtype:
    """Return the dtype of a record. Raises CheckpointError for an unknown name."""
    dtype = getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"a tensor has the dtype {record.dtype!r}, which torch does not have; load another"
            " checkpoint"
        )
    return dtype


def window_of(tensor: torch.Tensor) -> Window:
    """Return the part of a tensor that this rank has."""
    if not isinstance(tensor, DTensor):
        return tuple((0, size) for size in tensor.shape)
    return tuple((part.start, part.stop - part.start) for part in local_window(tensor))


def overlap(first: Window, second: Window) -> Window | None:
    """Return the intersection of two windows, or None if it is empty."""
    window = []
    for (first_start, first_length), (second_start, second_length) in zip(
        first, second, strict=True
    ):
        start = max(first_start, second_start)
        stop = min(first_start + first_length, second_start + second_length)
        if start >= stop:
            return None
        window.append((start, stop - start))
    return tuple(window)


def slices_within(part: Window, container: Window) -> tuple[slice, ...]:
    """Return the slices that select the window `part` from a tensor with the window `container`."""
    return tuple(
        slice(start - origin, start - origin + length)
        for (start, length), (origin, _) in zip(part, container, strict=True)
    )


def merge_stages(
    records: Iterable[tuple[int, Mapping[str, TensorRecord]]],
) -> dict[str, TensorRecord]:
    """Merge the (stage, records) of all pipeline stages. A merged record lists its stages."""
    merged: dict[str, TensorRecord] = {}
    for stage, stage_records in records:
        for name, record in stage_records.items():
            previous = merged.get(name)
            if previous is None:
                merged[name] = record.model_copy(update={"stages": (stage,)})
            else:
                merged[name] = previous.model_copy(update={"stages": (*previous.stages, stage)})
    return merged


@dataclass(frozen=True)
class TensorBlock:
    """Contiguous part of a tensor: several rows, or part of one row."""

    name: str
    row: int
    """Index of the first row in the local tensor."""
    column: int
    """Index of the first column in the local tensor."""
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
            # The host never has more than one block of a tensor on a device.
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
        self, name: str, record: TensorRecord, window: Window, *, is_first: bool
    ) -> Observer:
        """Return a function that adds blocks of one tensor to the hash.

        Args:
            name: Name of the tensor in the checkpoint.
            record: Record of the full tensor.
            window: Part of the full tensor that the blocks are taken from.
            is_first: Whether this is the tensor's first part. The first part also adds the number
                that depends on the tensor's identity.
        """
        tensor_numbers, row_seeds, column_seed = _seeds(name, record)
        if is_first:
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
    """Return (number per lane, row key seed per lane, column key seed) of a tensor."""
    identity = f"{name}\0{record.dtype}\0{','.join(map(str, record.shape))}".encode()
    seeds = np.frombuffer(hashlib.blake2b(identity, digest_size=40).digest(), dtype="<u8")
    return seeds[:2], seeds[2:4], seeds[4]


def _keys(seed: np.uint64, indices: Keys) -> Keys:
    """Return odd pseudo-random numbers that SplitMix64 generates."""
    return mix_bits(indices * np.uint64(GOLDEN_RATIO) + seed) | np.uint64(1)


def _row_sums(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return, for each row, the sum of words times keys, modulo 2^64 as int64.

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
            # int64 wraps modulo 2^64, with the same bits as an unsigned product.
            products = block.to(torch.int64).mul_(keys[column : column + _WORDS_AT_ONCE])
            sums[row : row + count] += products.sum(dim=1)
    return sums


def _row_indices(
    first: int, count: int, sizes: list[int], starts: list[int], shape: list[int]
) -> Keys:
    """Return the indices that rows of a local part have in the full tensor.

    A row is a vector along the last dimension. Rows are numbered over all other dimensions.

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
