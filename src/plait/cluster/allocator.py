"""Settings of the C library's allocator for runs on the CPU.

A training step frees and allocates the same activations, gradients and gathered parameters again
and again. glibc returns free memory at the end of its heap to the system, which has to zero every
page anew. At ZeRO 2 this takes a third of a step (`benchmarks/results/host_memory.json`). The
settings here let the process keep the memory, as torch's allocator for GPUs does.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# Parameters of `mallopt`, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_TRIM_THRESHOLD_BYTES = 2**31 - 1
"""Free memory above which the heap is trimmed. This is the largest value of an int."""
_MMAP_THRESHOLD_BYTES = 32 * 2**20
"""Size above which an allocation does not use the heap.

glibc accepts no larger value. It is half of the heap of a thread.
"""
USERS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
"""Variables with which a user configures the allocator."""


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Let this process keep up to 2 GiB of memory that it frees.

    Args:
        environment: Environment variables. If they configure the allocator, nothing is changed.

    Returns:
        Whether the settings were made. Other C libraries than glibc have none.
    """
    if any(name in environment for name in USERS) or not _is_glibc():
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
