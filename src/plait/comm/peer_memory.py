"""Memory of other processes of this machine, read in one copy by Linux's `process_vm_readv`, where its kernel allows that.

Sockets and shared memory take two copies. Which processes may read is the kernel's to say (containers, users, `ptrace_scope`), so nothing
is assumed: a process that reads 32 random bytes where another one says that they lie can read its memory.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

_BYTES = 32
_SET_PTRACER, _ANY, _NOBODY = 0x59616D61, ctypes.c_ulong(-1), ctypes.c_ulong(0)
"""Of prctl: which processes may read this one's memory beside those that began it."""


class _Stretch(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]


@dataclass(frozen=True)
class Proof:
    """Where a process keeps which random bytes."""

    boot: str
    """Of the machine, as it was started last; empty where it has none."""
    process: int
    start: int
    value: str
    """In hexadecimal digits."""

    def to_json(self) -> dict[str, Any]:
        """For another process."""
        return asdict(self)


def proof() -> Proof:
    """This process's."""
    return _proof_of(os.getpid())


def can_read(other: Proof) -> bool:
    """Whether this process reads the memory of another one, which is inside of `readable`."""
    if not other.boot or other.boot != proof().boot:
        return False
    found = torch.zeros(_BYTES, dtype=torch.uint8)
    try:
        read(other.process, other.start, found)
    except OSError:
        return False
    return bytes(found.numpy()).hex() == other.value


def read(process: int, start: int, into: torch.Tensor) -> None:
    """Fill `into`, in one stretch of this process's memory, with what lies from `start` on in that of another one. Raises OSError."""
    to, end = into.data_ptr(), into.data_ptr() + into.nbytes
    while to < end:
        here, there = _Stretch(to, end - to), _Stretch(start, end - to)
        count = _reader()(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            code = ctypes.get_errno() if count else errno.EFAULT
            raise OSError(code, os.strerror(code))
        to, start = to + count, start + count


@contextmanager
def readable() -> Iterator[None]:
    """Inside, other processes of the same user may read this one's memory, also where Linux is set to allow that to debuggers alone
    (`kernel.yama.ptrace_scope = 1`, as Ubuntu has it)."""
    _allow(1)
    try:
        yield
    finally:
        _allow(-1)


_LOCK = threading.Lock()
_inside = 0


def _allow(step: int) -> None:
    global _inside
    with _LOCK:
        _inside += step
        if _has_to_allow() and _inside == max(step, 0):
            ctypes.CDLL(None).prctl(_SET_PTRACER, _ANY if _inside else _NOBODY, 0, 0, 0)


@cache
def _has_to_allow() -> bool:
    try:
        return Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii").strip() == "1"
    except OSError:
        return False


@cache
def _proof_of(process: int) -> Proof:
    """A process that was forked has one of its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() if _reader() else ""
    except (OSError, AttributeError):  # no Linux
        boot = ""
    value = secrets.token_bytes(_BYTES)
    _KEPT[process] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
    return Proof(boot, process, _KEPT[process].data_ptr(), value.hex())


_KEPT: dict[int, torch.Tensor] = {}


@cache
def _reader() -> Any:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    function.restype = ctypes.c_ssize_t
    pointer = ctypes.POINTER(_Stretch)
    function.argtypes = [ctypes.c_int, pointer, ctypes.c_ulong, pointer, ctypes.c_ulong, ctypes.c_ulong]
    return function
