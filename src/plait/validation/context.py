"""Context of a check: its rank, the device, the time that is left, results of earlier rows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.cluster import accelerator
from plait.cluster.layout import Layout
from plait.cluster.mesh import Mesh, build_mesh, local_device
from plait.cluster.small_messages import all_gather_objects, broadcast_object
from plait.cluster.staged_group import make_default_group
from plait.cluster.topology import place
from plait.units import GIB
from plait.validation.rows import NotRun, Verdict

SIMULATED = "simulated device"
"""Part of the name of the device that the tests simulate. It has no times, and its memory is the
host's.
"""
NO_TIMES = "a simulated device has no times; the code that measures them ran to its end"


@dataclass
class Context:
    """Rank of a launch."""

    rank: int
    world: int
    shares_gpu: bool
    """Several ranks share a GPU and communicate through host memory."""
    simulated: bool
    calibration: Path | None = None
    """File that `kernels.calibrate` writes on rank 0."""
    progress: Callable[[Mapping[str, Any]], None] = lambda numbers: None
    """Receives partial numbers, which stay in the document when the row is cut."""
    row_deadline: float = float("inf")
    """Value of `time.monotonic` at which the planned time of the row has passed."""
    results: dict[str, Any] = field(default_factory=dict)
    """Results of rows for later rows of this process. The module that writes an entry documents it.
    """
    mesh: Mesh | None = None

    @property
    def device(self) -> torch.device:
        """Device of this rank. Work goes to it from the first use of this property."""
        return self.mesh.device if self.mesh is not None else local_device(None, place())

    @property
    def is_small(self) -> bool:
        """True if models shrink, because the device is simulated or a CPU."""
        return self.simulated or not accelerator.is_accelerator(self.device)

    def group(self) -> Mesh:
        """Return the mesh of all ranks. The first call makes the process group. Collective."""
        if self.mesh is None:
            if self.shares_gpu:
                make_default_group()
            self.mesh = build_mesh(
                Layout(dp_replicate=self.world), host_tensors=not self.shares_gpu
            )
        return self.mesh

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""
        accelerator.synchronize(self.device)

    def free_bytes(self) -> int:
        """Return the device memory that no process uses."""
        return accelerator.free_bytes(self.device)

    def release_memory(self) -> None:
        """Collect garbage and give memory that the allocator keeps back to the device."""
        gc.collect()
        accelerator.release_cached_memory(self.device)

    def from_first_rank(self, value: Any) -> Any:
        """Return rank 0's value. Collective."""
        if self.world == 1:
            return value
        self.group()
        return broadcast_object(value)

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Collective."""
        if self.world == 1:
            return [value]
        self.group()
        return all_gather_objects(value)

    def close(self) -> None:
        """Destroy the process group."""
        if self.mesh is not None:
            self.mesh.close()
            self.mesh = None
        if dist.is_initialized():
            dist.destroy_process_group()


def require(*packages: str) -> None:
    """Raise NotRun if a package is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise NotRun(f"{package} is not installed")


def require_real_device(context: Context, reason: str) -> None:
    """Raise NotRun with the reason if the device is simulated."""
    if context.simulated:
        raise NotRun(reason)


def require_compiler(context: Context) -> None:
    """Raise NotRun on a simulated device, for which the compiler cannot generate kernels."""
    require_real_device(
        context, "torch.compile cannot be simulated: it generates kernels for a real GPU"
    )


def timed(context: Context, result: Verdict) -> Verdict:
    """Return the verdict of a row about times. On a simulated device the row ran and shows
    nothing.
    """
    if context.simulated and result.outcome != "not run":
        return Verdict("not run", NO_TIMES)
    return result


def largest_size(
    context: Context, sizes: Mapping[str, Mapping[str, Any]], *, required_bytes: Mapping[str, float]
) -> Mapping[str, Any]:
    """Return the largest of `sizes` that fits into free device memory.

    Args:
        context: On a simulated device or a CPU, the last size is chosen.
        sizes: Sizes by name, the largest first.
        required_bytes: Device memory that each size needs.

    Raises:
        NotRun: None fits.
    """
    if context.is_small:
        return list(sizes.values())[-1]
    free = context.free_bytes() / (context.world if context.shares_gpu else 1)
    for name, size in sizes.items():
        if required_bytes[name] <= free:
            return size
    raise NotRun(
        f"needs {min(required_bytes.values()) / GIB:.1f} GiB, and the device has {free / GIB:.1f}"
        " GiB free"
    )


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Set torch's precision of float32 matrix products inside the block; `high` uses TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
