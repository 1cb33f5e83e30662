"""Paths as users write them, folders that can be written, and small files that are written
atomically.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import tempfile
from pathlib import Path
from typing import IO

from plait.errors import InputError

RUN_LOCK = ".lock"
"""The file in a run's folder that a running `plait train` holds."""


def is_only_writer(opened: IO[bytes] | IO[str] | int) -> bool:
    """Whether no other process holds this open file or folder, which is then held until it is
    closed or the process ends. True on a file system without locks.
    """
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def anonymous_file(name: str) -> int:
    """Return a descriptor of a new file in memory without a path. Child programs do not inherit it.

    Other processes open it as `/proc/<process>/fd/<descriptor>`. Linux on x86-64 only. Raises
    OSError.
    """
    close_on_exec = 1
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, close_on_exec)
    # The Pythons of uv and conda are built against a C library that is too old for os.memfd_create.
    try:
        system_call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError) as error:
        raise OSError(errno.ENOSYS, "this Python cannot make system calls") from error
    system_call.restype = ctypes.c_long
    number = 319  # memfd_create on x86-64
    descriptor = int(
        system_call(ctypes.c_long(number), name.encode(), ctypes.c_long(close_on_exec))
    )
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return descriptor


def is_at(path: Path, opened: IO[bytes] | IO[str] | int) -> bool:
    """Whether a path names this open file or folder: it may have been renamed or removed since."""
    try:
        return os.path.samestat(
            os.stat(path), os.fstat(opened if isinstance(opened, int) else opened.fileno())
        )
    except FileNotFoundError:
        return False


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name and rename it: a reader, also after a crash, finds the old
    text or the new one. Raises OSError.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(partial, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_result(path: Path, text: str) -> None:
    """The same, in a folder that is made where it is missing. Raises InputError where it cannot be
    written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


def is_url(text: str | Path) -> bool:
    """Return whether a text names a place in a store, as `s3://bucket/run` does. pathlib makes
    `s3:/bucket/run` of it.
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(text)) is not None


def user_path(text: str | Path, field: str) -> Path:
    """Return a path with `~` and `~name` replaced by the home of that user.

    Raises:
        InputError: There is no such user, or the text is a URL, for which pathlib would make a
            folder `s3:`.
    """
    if is_url(text):
        rule = "is a URL, and a path in a file system of this machine is needed"
        raise InputError(f"{field} = {str(text)!r}: {rule}; pass the path of a file or folder")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise InputError(
            f"{field} = {str(text)!r}: no user of this machine has that name; write the path in"
            " full"
        ) from None


def is_path(name: str) -> bool:
    """Whether a name that no file or folder has can only have been meant as one: the hub's names
    are `name` or `owner/name`.
    """
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def require_folder(text: str | Path, field: str) -> Path:
    """Make a folder unless it is there, and find out that files can be written in it. Raises
    InputError, naming `field`.
    """
    path = user_path(text, field)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".plait-"):
            pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        rule = "is a file" if path.is_file() else f"no file can be written there ({why})"
        raise InputError(
            f"{field} = {str(text)!r}: {rule}; name a folder that can be written"
        ) from None
    return path
