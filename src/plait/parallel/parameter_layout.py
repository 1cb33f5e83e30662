"""Layout of a parameter: its distribution over the ranks, and the order of its elements in memory.

`Reduction` describes the distribution. Norms, sums and checkpoints depend on it. Each mesh axis
either splits a tensor or replicates it, and replicas are bitwise equal once gradients are reduced.
The planner's counterpart is `accounting.ledger.ParameterPart`.

In memory a tensor is contiguous, transposed, channels last, or has gaps. A gradient that an
optimizer's fused kernel reads must have the memory layout of its parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from plait.cluster.layout import AXES, EXPERT_AXES, SPLIT_AXES


@dataclass(frozen=True)
class Reduction:
    """Distribution of one parameter, its gradient and its optimizer states over the ranks."""

    sharded: tuple[str, ...] = ()
    """Axes that split the parameter. All other axes replicate it."""
    summed: tuple[str, ...] = ()
    """Axes whose ranks compute the gradient from different parts of the batch.

    The gradient is the sum over them, once all hooks have reduced.
    """
    stages: tuple[int, ...] = ()
    """Coordinates along pp whose stages hold a tied parameter. Empty if it is on one stage."""

    def is_first_stage(self, coordinates: Mapping[str, int]) -> bool:
        """Return True if no earlier pipeline stage holds the parameter.

        Only this stage includes a tied parameter in norms and checkpoints.
        """
        return not self.stages or coordinates["pp"] == min(self.stages)

    def counts_in_norm(self, coordinates: Mapping[str, int]) -> bool:
        """Return True if a rank adds its shard to a sum over `Mesh.norm_axes`.

        Only the first replica does, so that every element is counted once.

        Args:
            coordinates: Coordinates of the rank by axis.
        """
        if "ep" in coordinates:
            return self._is_first_replica(coordinates, AXES)
        return self._is_first_replica(coordinates, SPLIT_AXES)

    def is_written_by(self, coordinates: Mapping[str, int]) -> bool:
        """Return True if a rank writes its shard to a checkpoint. Only the first replica does.

        Args:
            coordinates: Coordinates of the rank by axis.
        """
        return self._is_first_replica(coordinates, AXES)

    def _is_first_replica(self, coordinates: Mapping[str, int], axes: Collection[str]) -> bool:
        # For a parameter of experts, these axes take the place of all others but pp.
        if not set(self.sharded).isdisjoint(EXPERT_AXES):
            axes = EXPERT_AXES
        replicating = [axis for axis in axes if axis != "pp" and axis not in self.sharded]
        is_first = all(coordinates.get(axis, 0) == 0 for axis in replicating)
        return is_first and self.is_first_stage(coordinates)


def parameter_name(model: nn.Module, parameter: torch.Tensor) -> str:
    """Return the name of a parameter for an error message."""
    named = model.named_parameters()
    return next((name for name, p in named if p is parameter), "a parameter")


def sharded_axes(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return the mesh axes that split a tensor. A replicated or plain tensor has none."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    axes: list[str] = []
    for name, placement in zip(names, tensor.placements, strict=True):
        if not placement.is_replicate():
            axes.append(name)
    return tuple(axes)


def dims_in_memory(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions in the order of their strides, largest first.

    The result is None if the tensor has gaps or overlaps.
    """
    dims = sorted(
        range(tensor.ndim), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]), reverse=True
    )
    expected = 1
    for dim in reversed(dims):
        # A dimension of length 1 may have any stride.
        if tensor.shape[dim] != 1 and tensor.numel():
            if tensor.stride(dim) != expected:
                return None
            expected *= tensor.shape[dim]
    return dims


def like_in_memory(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """View a flat tensor in the shape and the memory layout of another one.

    If the layout of `tensor` has gaps, the view is contiguous.

    Args:
        flat: A contiguous tensor [tensor.numel()].
        tensor: The tensor with the shape and the strides.
    """
    if dims_in_memory(tensor) is None or tensor.is_contiguous():
        return flat.view(tensor.shape)
    return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if two elements share memory, as in an expanded tensor.

    Unusual strides may give a false positive.
    """
    dims = sorted((dim for dim in range(tensor.ndim) if tensor.shape[dim] > 1), key=tensor.stride)
    end = 0
    if not prod(tensor.shape):
        return False
    # From the smallest stride to the largest, each must step over all elements before it.
    for dim in dims:
        if tensor.stride(dim) <= end:
            return True
        end += (tensor.shape[dim] - 1) * tensor.stride(dim)
    return False


def like_parameter(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Wrap a local tensor in the placements of a parameter.

    Args:
        local: This rank's part, with the local shape of `parameter`.
        parameter: A plain parameter or a DTensor.

    Returns:
        `local` itself for a plain parameter, otherwise a DTensor.
    """
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
