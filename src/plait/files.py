"""User-specified paths, checks of folders, file locks, atomic writes of small files, and JSON."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from plait.errors import InputError

RUN_LOCK = ".lock"
"""Name of the file in a run's folder that a running `plait train` locks."""


def try_lock(opened: IO[bytes] | IO[str] | int) -> bool:
    """Lock an open file or folder. Return False if another process holds its lock.

    The lock is held until the file is closed or the process ends. The result is True on a file
    system without locks.
    """
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # The file system does not support locks.
        pass
    return True


def anonymous_file(name: str) -> int:
    """Return a descriptor of a new file in memory without a path. Child programs do not inherit it.

    Other processes open it as `/proc/<process>/fd/<descriptor>`. Only Linux on x86-64 is supported.

    Raises:
        OSError: The system cannot create such a file.
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


def names_open_file(path: Path, opened: IO[bytes] | IO[str] | int) -> bool:
    """Return True if a path still names this open file or folder.

    Another process may have renamed or removed it since it was opened.
    """
    descriptor = opened if isinstance(opened, int) else opened.fileno()
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically, by renaming a temporary file.

    A reader sees the old text or the new one, even after a crash.

    Raises:
        OSError: The file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(partial, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            # Without it a crash could leave an empty file under the final name.
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_atomically_in_folder(path: Path, text: str) -> None:
    """Write a file atomically, and create its folder if it is missing.

    Raises:
        InputError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise not_writable(str(path), error) from None


def not_writable(place: str, error: OSError) -> InputError:
    """Return the error for a file that cannot be written.

    Args:
        place: Path of the file, after the option that names it.
        error: Error of the system.
    """
    remedy = "pass another path"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free some space there, or pass another path"
    return InputError(f"{place}: cannot be written ({error.strerror}); {remedy}")


def is_url(text: str | Path) -> bool:
    """Return True if a string names a location in an object store, for example `s3://bucket/run`.

    A `Path` of such a string is recognised too, although pathlib turns it into `s3:/bucket/run`.
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(text)) is not None


def user_path(text: str | Path, field: str) -> Path:
    """Return a path with `~` and `~name` replaced by the home folder of that user.

    Raises:
        InputError: The user does not exist, or the text is a URL. pathlib would treat a URL as a
            path in a local folder `s3:`.
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
    """Return True if a name can only be a path. Names on the hub are `name` or `owner/name`.

    If no file or folder of the name exists, this distinguishes a mistyped path from a name on the
    hub.
    """
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def is_file(text: str) -> bool:
    """Return True if a string is the path of an existing file."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        # The text is too long for a path, or contains a zero byte.
        return False


def with_finite_numbers(value: Any) -> Any:
    """Return nested mappings and sequences for JSON, with NaN and infinity as text.

    JSON has no such numbers.
    """
    if isinstance(value, Mapping):
        return {str(key): with_finite_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [with_finite_numbers(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def require_folder(text: str | Path, field: str) -> Path:
    """Create a folder if it is missing, and check that files can be written in it.

    Args:
        text: Path that the user wrote.
        field: Configuration key or option of the path, for the message.

    Raises:
        InputError: The folder cannot be created or written.
    """
    path = user_path(text, field)
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Permissions alone do not tell: the file system may be read-only or full.
        with tempfile.NamedTemporaryFile(dir=path, prefix=".plait-"):
            pass
    except (OSError, ValueError) as error:
        rule = f"no file can be written there ({getattr(error, 'strerror', None) or error})"
        if path.is_file():
            rule = "is a file"
        raise InputError(
            f"{field} = {str(text)!r}: {rule}; name a folder that can be written"
        ) from None
    return path
