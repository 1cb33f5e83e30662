"""Free memory of this machine, and memory of processes."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_host_bytes() -> int | None:
    """Return the memory that is available without swapping, or None if it is not known.

    It is the smaller one of the kernel's estimate and the rest of the container's limit.
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
    """Return the memory of a process, with its part of memory that processes share.

    The result is 0 if the kernel does not report it.
    """
    with suppress(OSError, StopIteration, ValueError):
        return _field(Path(f"/proc/{process}/smaps_rollup"), "Pss:") * 1024
    return 0


def _field(path: Path, name: str) -> int:
    """Return the number after a name at the beginning of a line.

    Raises:
        StopIteration: No line begins with the name.
    """
    lines = path.read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def trim_heap() -> None:
    """Give freed heap memory, which the C library keeps for reuse, back to the system.

    This does nothing if the C library has no `malloc_trim`.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
