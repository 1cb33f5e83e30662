"""Distribution of a parameter over the ranks, for norms, sums and checkpoints.

An axis either splits a tensor or replicates it. Replicas are bitwise equal once gradients are
reduced. The counterpart in numbers is `accounting.ledger.ParameterPart`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from plait.cluster.layout import AXES, EXPERT_AXES, SPLIT_AXES


@dataclass(frozen=True)
class Reduction:
    """Distribution of one parameter, its gradient and its optimizer states."""

    sharded: tuple[str, ...] = ()
    """Axes that split it. All other axes replicate it."""
    summed: tuple[str, ...] = ()
    """Axes whose ranks compute its gradient from different parts of the batch.

    The gradient is the sum over them, once all hooks have reduced.
    """
    stages: tuple[int, ...] = ()
    """Coordinates along pp that hold a tied parameter. Empty if each stage has a separate tensor.
    """

    def is_first_stage(self, at: Mapping[str, int]) -> bool:
        """Return True if no earlier pipeline stage holds it.

        Only this stage counts and writes a tied parameter.
        """
        return not self.stages or at["pp"] == min(self.stages)

    def counts_at(self, at: Mapping[str, int]) -> bool:
        """Return True if a rank adds its shard to a sum over `Mesh.norm_axes`.

        Only the first replica does, so that every element is counted once.

        Args:
            at: Coordinates of the rank by axis.
        """
        if "ep" in at:
            return self._is_first_replica(at, AXES)
        return self._is_first_replica(at, SPLIT_AXES)

    def is_written_at(self, at: Mapping[str, int]) -> bool:
        """Return True if a rank writes its shard to a checkpoint. Only the first replica does.

        Args:
            at: Coordinates of the rank by axis.
        """
        return self._is_first_replica(at, AXES)

    def _is_first_replica(self, at: Mapping[str, int], axes: Collection[str]) -> bool:
        # For a parameter of experts, these axes take the place of all others but pp.
        if not set(self.sharded).isdisjoint(EXPERT_AXES):
            axes = EXPERT_AXES
        replicating = [axis for axis in axes if axis != "pp" and axis not in self.sharded]
        return self.is_first_stage(at) and all(at.get(axis, 0) == 0 for axis in replicating)


def sharded_axes(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return the mesh axes that split a tensor. A replicated or plain tensor has none."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    return tuple(
        name
        for name, placement in zip(names, tensor.placements, strict=True)
        if not placement.is_replicate()
    )
