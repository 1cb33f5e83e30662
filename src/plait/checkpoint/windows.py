"""Which ranks of a saved layout hold which part of a tensor: a few numbers for each tensor, from
which any rank computes it.

A tensor is cut along mesh axes by torch.chunk's rule, one axis after the other; over the axes that
do not cut it, it is replicated, and the first rank of the replicas writes it. So the plan of a
checkpoint has the size of the model's list of tensors, whatever the world size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Self

import torch
from pydantic import Field, NonNegativeInt, model_validator
from torch.distributed.tensor import DTensor

from plait._torch.dtensor import local_window, shard_order
from plait.cluster.layout import AXES, EXPERT_AXES, Layout
from plait.errors import CheckpointError
from plait.parallel.reduction import Reduction
from plait.policy import Policy
from plait.shards import shard_length, shard_size

Window = tuple[tuple[int, int], ...]
"""(start, length) by dimension."""


class TensorRecord(Policy):
    """A tensor of a checkpoint."""

    dtype: str
    """Without `torch.`."""
    shape: tuple[NonNegativeInt, ...]
    """Global."""
    cuts: tuple[tuple[str, NonNegativeInt], ...] = ()
    """(mesh axis, dimension), in the order in which they cut."""
    stages: tuple[NonNegativeInt, ...] = Field((0,), min_length=1)
    """Coordinates along pp that hold it; the first one writes it."""

    @model_validator(mode="after")
    def _cuts_what_is_there(self) -> Self:
        for axis, dim in self.cuts:
            if axis not in (*AXES, *EXPERT_AXES) or dim >= len(self.shape):
                raise ValueError(f"{axis} cannot cut dimension {dim} of {self.shape}")
        return self

    def window(self, at: Mapping[str, int], degrees: Mapping[str, int]) -> Window:
        """What the rank at the coordinates `at` holds."""
        starts = [0] * len(self.shape)
        sizes = list(self.shape)
        for axis, dim in self.cuts:
            ranks = degrees.get(axis, 1)
            rank = at.get(axis, 0)
            starts[dim] += min(rank * shard_size(sizes[dim], ranks), sizes[dim])
            sizes[dim] = shard_length(sizes[dim], ranks, rank)
        return tuple(zip(starts, sizes, strict=True))

    def is_written_by(self, at: Mapping[str, int]) -> bool:
        """Whether the rank at the coordinates writes its part."""
        return Reduction(
            tuple(axis for axis, _ in self.cuts), stages=self.stages[:1]
        ).is_written_at(at)

    def begins_at(self, at: Mapping[str, int]) -> bool:
        """Whether, of the ranks that write a part, the one at the coordinates writes the first."""
        return all(at.get(axis, 0) == 0 for axis, _ in self.cuts)

    def parts(self, layout: Layout, wanted: Window) -> Iterator[tuple[int, Window]]:
        """(rank, what it holds) of every rank that wrote a part of `wanted`."""
        axes = list(dict.fromkeys(axis for axis, _ in self.cuts))
        degrees = layout.all_degrees
        for point in product(*(range(degrees.get(axis, 1)) for axis in axes)):
            at = (
                dict.fromkeys(AXES, 0)
                | {"pp": self.stages[0]}
                | dict(zip(axes, point, strict=True))
            )
            held = self.window(at, degrees)
            if overlap(held, wanted) is not None:
                yield layout.rank(**at), held


def record_of(tensor: torch.Tensor) -> TensorRecord:
    """Of a tensor that this rank holds a part of. Raises ValueError for one that is neither sharded
    nor replicated.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return TensorRecord(dtype=dtype, shape=shape)
    names = tensor.device_mesh.mesh_dim_names
    if names is None or any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"a DTensor with the placements {tensor.placements} is a part of a sum, or its mesh has"
            " no names"
        )
    record = TensorRecord(
        dtype=dtype,
        shape=shape,
        cuts=tuple((names[axis], dim) for axis, dim in shard_order(tensor)),
    )
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    at, degrees = (
        dict(zip(names, values, strict=True)) for values in (coordinate, tensor.device_mesh.shape)
    )
    assert record.window(at, degrees) == window_of(tensor), (record, tensor.placements)
    return record


def dtype_of(record: TensorRecord) -> torch.dtype:
    """Raises CheckpointError for a name that is no dtype."""
    found = getattr(torch, record.dtype, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"a tensor's dtype is {record.dtype!r}, which is none of torch's")
    return found


def window_of(tensor: torch.Tensor) -> Window:
    """Which part of a tensor this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple((0, size) for size in tensor.shape)
    return tuple((part.start, part.stop - part.start) for part in local_window(tensor))


def overlap(one: Window, other: Window) -> Window | None:
    """What two windows share; None for nothing."""
    found = []
    for (a, length), (b, more) in zip(one, other, strict=True):
        start = max(a, b)
        stop = min(a + length, b + more)
        if start >= stop:
            return None
        found.append((start, stop - start))
    return tuple(found)


def inside(part: Window, of: Window) -> tuple[slice, ...]:
    """The slices that take `part` out of a tensor that is `of`."""
    return tuple(
        slice(start - begin, start - begin + length)
        for (start, length), (begin, _) in zip(part, of, strict=True)
    )


def merged(records: Iterable[tuple[int, Mapping[str, TensorRecord]]]) -> dict[str, TensorRecord]:
    """The records of all pipeline stages as one: (stage, its records) to records that name all
    stages that hold a tensor.
    """
    found: dict[str, TensorRecord] = {}
    for stage, one in records:
        for name, record in one.items():
            before = found.get(name)
            stages = (stage,) if before is None else (*before.stages, stage)
            found[name] = (before or record).model_copy(update={"stages": stages})
    return found
