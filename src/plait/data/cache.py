"""Folders that are built once, named after what they were built from, and shared by every process
of the machine.

A folder appears under its final name only when it is complete: it is built under a temporary name
and renamed. Processes that want the same folder at the same time wait for the first one. Nothing
here is ever changed after it was written.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from plait.errors import InputError


def digest(parts: Iterable[bytes | str]) -> str:
    """A name for `parts`: 32 hexadecimal digits. Lengths are hashed too, so `("ab", "c")` and
    `("a", "bc")` differ.
    """
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.hexdigest()


def built_once(root: Path, kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """The folder `root/kind/key`, filled by `build(folder)` unless it is there already.

    Safe against a crash in the middle (nothing incomplete is ever found) and against other
    processes that build the same. Raises InputError when `root` cannot be written.
    """
    folder = root / kind / key
    if folder.is_dir():
        return folder
    with _only_one(root / kind, key):
        if folder.is_dir():
            return folder
        unfinished = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=root / kind))
        try:
            build(unfinished)
            unfinished.chmod(0o755)
            os.rename(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@contextmanager
def _only_one(parent: Path, key: str) -> Iterator[None]:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        lock = open(parent / f".{key}.lock", "w")  # noqa: SIM115 (closed by the `with` below)
    except OSError as error:
        rule = f"the cache folder {parent} cannot be written ({error.strerror})"
        raise InputError(f"{rule}; set data.cache or PLAIT_CACHE to a folder that can") from error
    with lock:  # the system lets go of the lock when the process ends, however it ends
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
