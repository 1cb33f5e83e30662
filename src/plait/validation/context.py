"""What a check finds in its process: its rank, the device, and what the machine is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from plait.cluster import accelerator
from plait.cluster.layout import Layout
from plait.cluster.mesh import Mesh, build_mesh, local_device
from plait.cluster.staged_group import make_default_group
from plait.cluster.topology import place
from plait.units import GIB
from plait.validation.rows import Found, NotRun

SIMULATED = "simulated device"
"""How the device that the tests simulate calls itself. It has no times, and host memory for its own."""
NO_TIMES = "a simulated device has no times; what measures them ran"


@dataclass
class Context:
    """One rank of a launch."""

    rank: int
    world: int
    shared: bool
    """Several ranks share a GPU and talk through host memory."""
    simulated: bool
    mesh: Mesh | None = None

    @property
    def device(self) -> torch.device:
        """This rank's, which its work goes to from here on."""
        return self.mesh.device if self.mesh is not None else local_device(None, place())

    def group(self) -> Mesh:
        """The process group of the launch, made when a check first needs it: a prediction for one rank must come before. Collective."""
        if self.mesh is None:
            if self.shared:
                make_default_group()
            self.mesh = build_mesh(Layout(dp_replicate=self.world), host_tensors=not self.shared)
        return self.mesh

    def synchronize(self) -> None:
        """Wait for the device."""
        accelerator.synchronize(self.device)

    def free_bytes(self) -> int:
        """Of the device, now."""
        return accelerator.free_bytes(self.device)

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value. Collective."""
        self.group()
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        """End the group."""
        if self.mesh is not None:
            self.mesh.close()
            self.mesh = None
        if dist.is_initialized():
            dist.destroy_process_group()


def require(*packages: str) -> None:
    """Raise NotRun where one is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise NotRun(f"{package} is not installed")


def timed(context: Context, found: Found) -> Found:
    """What was found of a row about times: on a simulated device it did run, and shows nothing."""
    return Found("not run", NO_TIMES) if context.simulated and found.outcome != "not run" else found


def sized(context: Context, sizes: Mapping[str, Mapping[str, Any]], *, least_bytes: Mapping[str, float]) -> Mapping[str, Any]:
    """The largest of `sizes` whose `least_bytes` the device has free, in the order given; on a simulated device the last."""
    names = list(sizes)
    if not context.simulated:
        free = context.free_bytes() / (context.world if context.shared else 1)
        for name in names:
            if least_bytes[name] <= free:
                return sizes[name]
        raise NotRun(f"needs {min(least_bytes.values()) / GIB:.1f} GiB, and the device has {free / GIB:.1f} GiB free")
    return sizes[names[-1]]


@contextmanager
def dtype_of_products(name: str) -> Iterator[None]:
    """torch's precision of float32 products while inside: `high` uses TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
