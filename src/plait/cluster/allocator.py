"""The C library's allocator on CPU runs: memory that a step frees stays with the process, and the
next step takes it again.

A step frees and takes the same activations, gradients and gathered parameters over and over. glibc
gives what lies free at the end of its heap back to the system, which zeroes every page anew. At
ZeRO 2 that is a third of a step (`benchmarks/results/host_memory.json`). torch's allocator for GPUs
keeps what is freed for the same reason.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""malloc.h's names of what may be set."""
_KEPT_BYTES = 2**31 - 1
_LARGEST_IN_HEAP = 32 * 2**20
"""The most that the two can be: an int, and half of a heap of a thread."""
USERS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
"""Variables by which a user sets it."""


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Up to 2 GiB of it. Whether that was set: not on other C libraries, nor where the environment
    sets glibc's allocator.
    """
    if any(name in environment for name in USERS) or not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)) and bool(
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    )


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ValueError, OSError, AttributeError):
        return False
