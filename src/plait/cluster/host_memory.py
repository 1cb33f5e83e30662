"""Memory of the host: how much is free, the allocator's settings, and huge pages.

Note [Freed memory]
    A training step frees and allocates the same activations, gradients and gathered parameters
    again and again. glibc returns free memory at the end of its heap to the system, which has to
    zero every page again. At ZeRO 2 this takes a third of a step
    (`benchmarks/results/host_memory.json`). `keep_freed_memory` lets the process keep the memory,
    as torch's allocator for GPUs does.

Note [Huge pages]
    A matrix-vector product reads every weight once. It spends less time on page tables if the
    weights are on huge pages, which saves 4 to 7 % of the time per token
    (`benchmarks/results/host_memory.json`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path

import torch
from torch import nn

from plait._torch.tensors import local_tensor

_CGROUP = Path("/sys/fs/cgroup")
# Parameters of `mallopt`, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_TRIM_THRESHOLD_BYTES = 2**31 - 1
"""Free memory above which the heap is trimmed. This is the largest value of an int."""
_MMAP_THRESHOLD_BYTES = 32 * 2**20
"""Size above which an allocation does not use the heap.

glibc accepts no larger value. It is half of the heap of a thread.
"""
USER_VARIABLES = (
    "GLIBC_TUNABLES",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
)
"""Variables with which a user configures the allocator."""
HUGE_PAGE = 2 << 20
"""Bytes of a huge page."""


def free_host_bytes() -> int | None:
    """Return the memory that is available without swapping, or None if it is not known.

    It is the minimum of the kernel's estimate and the unused part of the container's limit.
    """
    estimates: list[int] = []
    with suppress(OSError, StopIteration, ValueError):
        estimates.append(_field(Path("/proc/meminfo"), "MemAvailable:") * 1024)
    # Without a limit of the container the file is missing or has the text `max`.
    with suppress(OSError, StopIteration, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        # The kernel drops this part of the page cache when memory is short.
        cache = _field(_CGROUP / "memory.stat", "inactive_file ")
        estimates.append(limit - used + cache)
    return min(estimates, default=None)


def process_bytes(process: int) -> int:
    """Return the memory of a process, including its proportional part of shared memory.

    The result is 0 if the kernel does not report the memory.
    """
    with suppress(OSError, StopIteration, ValueError):
        return _field(Path(f"/proc/{process}/smaps_rollup"), "Pss:") * 1024
    return 0


def _field(path: Path, name: str) -> int:
    """Return the number that follows `name` in the line that begins with `name`.

    Raises:
        StopIteration: No line begins with the name.
    """
    lines = path.read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def trim_heap() -> None:
    """Release freed heap memory that the C library keeps for reuse.

    This does nothing if the C library has no `malloc_trim`.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Let this process keep up to 2 GiB of memory that it frees.

    Args:
        environment: Environment variables. If they configure the allocator, nothing is changed.

    Returns:
        Whether the allocator was configured, which requires glibc.
    """
    if any(name in environment for name in USER_VARIABLES) or not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    if not mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES))


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ValueError, OSError, AttributeError):
        return False


def empty_on_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised CPU tensor that begins at a huge page.

    If the tensor is smaller than a huge page, or the system has none, the result is that of
    `torch.empty`.
    """
    numel = prod(shape)
    size = numel * dtype.itemsize
    if size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)

    # The additional page leaves room for the alignment. Pages that are never written take no
    # memory.
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    end = start + size // HUGE_PAGE * HUGE_PAGE
    memory.madvise(mmap.MADV_HUGEPAGE, start, end - start)
    # The end of the tensor would otherwise take a full huge page.
    memory.madvise(mmap.MADV_NOHUGEPAGE, end)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=start).view(shape)


@torch.no_grad()
def move_to_huge_pages(model: nn.Module) -> None:
    """Move this rank's CPU parameters to huge pages.

    Values are not copied, so call this before the parameters are initialised.
    """
    for parameter in model.parameters():
        local = local_tensor(parameter)
        if local.device.type == "cpu" and local.is_contiguous() and local.nbytes >= HUGE_PAGE:
            local.set_(empty_on_huge_pages(tuple(local.shape), local.dtype))  # type: ignore[call-overload]
