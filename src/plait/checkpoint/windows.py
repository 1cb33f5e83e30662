"""Windows of tensors: which ranks of a saved layout have which part of each tensor.

Note [Windows]
    A window is the (start, length) of a rank's part in every dimension. A tensor is cut along mesh
    axes by the rule of torch.chunk, one axis after the other. Over the axes that do not cut it, it
    is replicated, and the first replica writes it. A record of a few numbers per tensor is
    therefore enough to compute the window of any rank, and the metadata of a checkpoint does not
    grow with the world size.
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
from plait.units import dtype_name

Window = tuple[tuple[int, int], ...]
"""(start, length) per dimension."""


class TensorRecord(Policy):
    """Shape, dtype and cuts of a tensor in a checkpoint."""

    dtype: str
    """Name of the dtype without `torch.`."""
    shape: tuple[NonNegativeInt, ...]
    """Global shape."""
    cuts: tuple[tuple[str, NonNegativeInt], ...] = ()
    """(mesh axis, dimension) pairs, in the order in which they cut the tensor."""
    stages: tuple[NonNegativeInt, ...] = Field((0,), min_length=1)
    """Coordinates along pp of the stages that have it. The first one writes it."""

    @model_validator(mode="after")
    def _cuts_existing_dimensions(self) -> Self:
        for axis, dim in self.cuts:
            if axis not in (*AXES, *EXPERT_AXES) or dim >= len(self.shape):
                raise ValueError(f"{axis} cannot cut dimension {dim} of {self.shape}")
        return self

    def window(self, coordinates: Mapping[str, int], degrees: Mapping[str, int]) -> Window:
        """Return the part of a rank.

        Args:
            coordinates: Coordinates of the rank by mesh axis.
            degrees: Degrees of the layout by mesh axis.
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
        """Return True if the rank at the coordinates writes its part."""
        axes = tuple(axis for axis, _ in self.cuts)
        return Reduction(axes, stages=self.stages[:1]).is_written_at(coordinates)

    def begins_at(self, coordinates: Mapping[str, int]) -> bool:
        """Return True if the rank at the coordinates has the first part, or all of the tensor."""
        return all(coordinates.get(axis, 0) == 0 for axis, _ in self.cuts)

    def parts(self, layout: Layout, target: Window) -> Iterator[tuple[int, Window]]:
        """Yield (rank, its window) for every rank that wrote a part of the window `target`."""
        axes = list(dict.fromkeys(axis for axis, _ in self.cuts))
        degrees = layout.all_degrees
        for point in product(*(range(degrees.get(axis, 1)) for axis in axes)):
            coordinates = dict.fromkeys(AXES, 0)
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
            f"a DTensor with the placements {tensor.placements} is a partial sum, or its mesh has"
            " no names"
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
        raise CheckpointError(f"a tensor's dtype is {record.dtype!r}, which torch does not have")
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


def inside(part: Window, container: Window) -> tuple[slice, ...]:
    """Return the slices that select the window `part` from a tensor of the window `container`."""
    return tuple(
        slice(start - origin, start - origin + length)
        for (start, length), (origin, _) in zip(part, container, strict=True)
    )


def merge_stages(
    records: Iterable[tuple[int, Mapping[str, TensorRecord]]],
) -> dict[str, TensorRecord]:
    """Merge the (stage, records) of all pipeline stages; a record then lists all its stages."""
    merged: dict[str, TensorRecord] = {}
    for stage, stage_records in records:
        for name, record in stage_records.items():
            previous = merged.get(name)
            if previous is None:
                merged[name] = record.model_copy(update={"stages": (stage,)})
            else:
                merged[name] = previous.model_copy(update={"stages": (*previous.stages, stage)})
    return merged
