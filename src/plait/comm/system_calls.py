"""Two calls of Linux that Python's `os` has only where it was built against a C library new enough: not in the Pythons of uv and conda.

There the C library of this machine is asked, else the kernel. Only for x86-64, whose numbers of system calls these are.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

_CLOSE_ON_EXEC = 1
_MEMFD_CREATE, _PIDFD_OPEN = 319, 434


def memfd_create(name: str) -> int:
    """A descriptor of a new anonymous file, closed in programs that this process starts. Raises OSError."""
    found = getattr(os, "memfd_create", None)
    return int(found(name, _CLOSE_ON_EXEC)) if found is not None else _call(_MEMFD_CREATE, name.encode(), _CLOSE_ON_EXEC)


def pidfd_open(process: int) -> int:
    """A descriptor that becomes readable when a process ends, closed in programs that this process starts. Raises OSError."""
    found = getattr(os, "pidfd_open", None)
    return int(found(process)) if found is not None else _call(_PIDFD_OPEN, process, 0)


def _call(number: int, *arguments: Any) -> int:
    try:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError) as error:
        raise OSError(errno.ENOSYS, "this Python cannot make system calls") from error
    syscall.restype = ctypes.c_long
    result = int(syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
