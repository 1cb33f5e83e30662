"""Which ranks hold what of a parameter, and whose gradients are summed into its own: one value for
the norm, for sums and for checkpoints.

An axis either splits a tensor, or replicates it, and replicas are equal to the bit once gradients
are reduced. In numbers the same is `accounting.ledger.Part`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from plait.cluster.layout import AXES, EXPERT_AXES, SPLIT_AXES


@dataclass(frozen=True)
class Reduction:
    """Of one parameter, its gradient and what is shaped like it."""

    sharded: tuple[str, ...] = ()
    """Axes over which it is split; over the others it is replicated."""
    summed: tuple[str, ...] = ()
    """Axes whose ranks compute its gradient from other parts of the batch: it is the sum over them,
    once all hooks have reduced.
    """
    stages: tuple[int, ...] = ()
    """Coordinates along pp that hold it; empty: each stage has a tensor of its own."""

    def is_first_stage(self, at: Mapping[str, int]) -> bool:
        """Whether no earlier pipeline stage holds it: of a tied parameter one stage counts and
        writes.
        """
        return not self.stages or at["pp"] == min(self.stages)

    def counts_at(self, at: Mapping[str, int]) -> bool:
        """Whether the part of the rank at these coordinates belongs into a sum over
        `Mesh.norm_axes`: that of the first replica does.
        """
        return self._first(at, SPLIT_AXES if "ep" not in at else AXES)

    def is_written_at(self, at: Mapping[str, int]) -> bool:
        """Whether the rank at these coordinates writes its part into a checkpoint: of all replicas
        the first one does.
        """
        return self._first(at, AXES)

    def _first(self, at: Mapping[str, int], among: Collection[str]) -> bool:
        # which take the place of all others but pp
        if not set(self.sharded).isdisjoint(EXPERT_AXES):
            among = EXPERT_AXES
        return self.is_first_stage(at) and all(
            at.get(axis, 0) == 0 for axis in among if axis != "pp" and axis not in self.sharded
        )


def sharded_axes(tensor: torch.Tensor) -> tuple[str, ...]:
    """The mesh axes over which a tensor is split; none for a replicated or plain one."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    return tuple(
        name
        for name, placement in zip(names, tensor.placements, strict=True)
        if not placement.is_replicate()
    )
