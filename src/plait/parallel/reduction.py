"""Which ranks hold what of a parameter and its gradient: the axes over which it is split, and the rank that counts it where it is not.

An axis of `SPLIT_AXES` either splits a tensor or replicates it, and replicas are equal to the bit once gradients are reduced.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from plait.cluster.layout import SPLIT_AXES
from plait.cluster.mesh import Mesh


def sharded_axes(tensor: torch.Tensor) -> tuple[str, ...]:
    """The mesh axes over which a tensor is split; none for a replicated or plain one."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    return tuple(name for name, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate())


def counts_here(sharded: tuple[str, ...], mesh: Mesh) -> bool:
    """Whether this rank's part of a tensor that is split over the axes `sharded` belongs into a sum over `SPLIT_AXES`: of replicas the
    first one does. Every pipeline stage counts its own parameters."""
    return all(mesh.coordinates[axis] == 0 for axis in SPLIT_AXES if axis != "pp" and axis not in sharded)
