"""How much memory this machine has left, and what a process takes of it."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path


def free_host_bytes() -> int | None:
    """Memory that can be had without swapping, by the kernel's estimate and the container's limit;
    None where neither is known.
    """
    found: list[int] = []
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(
            int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
        )
    # no container limit: the file is missing or says `max`
    with suppress(OSError, StopIteration, ValueError):
        folder = Path("/sys/fs/cgroup")
        used = int((folder / "memory.current").read_text())
        cache = next(
            line
            for line in (folder / "memory.stat").read_text().splitlines()
            if line.startswith("inactive_file ")
        )
        found.append(int((folder / "memory.max").read_text()) - used + int(cache.split()[1]))
    return min(found) if found else None


def process_bytes(process: int) -> int:
    """What a process takes, with its share of what it has in common with others; 0 where the kernel
    does not say.
    """
    with suppress(OSError, StopIteration, ValueError):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024
    return 0


def trim_heap() -> None:
    """Let the C library give the system the memory that was freed, which it may keep; nothing where
    it has no such call.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
