"""The only place where process groups are made: a layout over the processes that exist.

An existing default group is adopted (the user made it, the user destroys it); otherwise one is made from the launcher's environment, or
for a single process without any launcher. Sub-groups are torch's DeviceMesh dimensions, one per axis of degree above 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from plait.cluster.layout import AXES, Layout
from plait.cluster.topology import Place, place
from plait.errors import ConfigError, Problem

DEFAULT_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Mesh:
    """A layout made real: this process's rank and device, and the groups along every axis."""

    layout: Layout
    device: torch.device
    rank: int
    device_mesh: DeviceMesh
    owns_default_group: bool

    @property
    def coordinates(self) -> dict[str, int]:
        """Where this process sits on every axis."""
        return self.layout.coordinates(self.rank)

    @property
    def dp_index(self) -> int:
        """Which slice of the batch this process reads."""
        return self.layout.dp_index(self.rank)

    def sub(self, *axes: str) -> DeviceMesh:
        """The mesh over `axes`, outermost first. Raises KeyError for an axis that has no group."""
        present = self.device_mesh.mesh_dim_names or ()
        missing = [axis for axis in axes if axis not in present]
        if missing:
            raise KeyError(f"no group along {missing}: their degree is 1; this mesh has {present}")
        return self.device_mesh[axes if len(axes) > 1 else axes[0]]

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The process group over `axes` taken together; None when their degrees are all 1 (nothing to communicate)."""
        used = tuple(axis for axis in AXES if axis in axes and getattr(self.layout, axis) > 1)
        if not used:
            return None
        mesh = self.sub(*used)
        return mesh.get_group() if len(used) == 1 else mesh._flatten().get_group()

    def close(self) -> None:
        """Destroy the default group, if this mesh made it."""
        if self.owns_default_group and dist.is_initialized():
            dist.destroy_process_group()


def build_mesh(layout: Layout, *, device_type: str | None = None, timeout: timedelta = DEFAULT_TIMEOUT, host_tensors: bool = False) -> Mesh:
    """Groups for `layout` over the processes that exist.

    `device_type` is `cuda` or `cpu`; by default a GPU where there is one. `host_tensors`: with GPUs, collectives on tensors in host memory
    are wanted too (offloaded parameters are gathered there for checkpoints). Raises ConfigError when the layout's world is not the real
    one.
    """
    here = place()
    device = local_device(device_type, here)
    owns = not dist.is_initialized()
    if owns:
        _make_default_group(here, device, timeout, host_tensors=host_tensors)
    if dist.get_world_size() != layout.world_size:
        world = dist.get_world_size()
        if owns:
            dist.destroy_process_group()
        raise ConfigError(
            Problem(
                "parallel", str(layout), f"the layout needs {layout.world_size} processes and {world} exist", f"start {layout.world_size}"
            )
        )
    # fully_shard wants a dimension to shard over even where it has one rank; every other axis of degree 1 gets no group.
    names = tuple(axis for axis in AXES if getattr(layout, axis) > 1 or axis == "dp_shard")
    device_mesh = init_device_mesh(device.type, tuple(getattr(layout, axis) for axis in names), mesh_dim_names=names)
    return Mesh(layout, device, dist.get_rank(), device_mesh, owns)


def default_device_type() -> str:
    """What a process gets unless it is told: `cuda` where there is a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def local_device(device_type: str | None, here: Place) -> torch.device:
    """This process's device: `cuda:local_rank`, or the CPU."""
    kind = device_type or default_device_type()
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, here.local_rank)
    torch.cuda.set_device(device)
    return device


def _make_default_group(here: Place, device: torch.device, timeout: timedelta, *, host_tensors: bool) -> None:
    nccl = "cpu:gloo,cuda:nccl" if host_tensors else "nccl"
    backend = nccl if device.type == "cuda" else "gloo"
    if here.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    device_id = device if device.type == "cuda" else None
    dist.init_process_group(backend, rank=here.rank, world_size=here.world_size, timeout=timeout, device_id=device_id)
