"""Cache of folders that are built once and shared by all processes of a machine.

A folder is named after the content that it was built from. It is built under a temporary name and
renamed when it is complete. Processes that need the same folder at the same time wait for the first
of them. A folder never changes after it was renamed.
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
    """Return a digest of `parts` with 32 hexadecimal digits.

    Lengths are hashed too, so that `("ab", "c")` and `("a", "bc")` differ.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


def build_once(root: Path, kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder `root/kind/key`, and build it if it does not exist.

    A crash leaves no incomplete folder, and other processes can build the same folder at the same
    time.

    Args:
        root: Folder of the cache.
        kind: Subfolder for entries of one kind.
        key: Digest of everything that the content depends on.
        build: Fills the empty folder that it receives.

    Raises:
        InputError: `root` cannot be written.
    """
    folder = root / kind / key
    if folder.is_dir():
        return folder

    with _lock(root / kind, key):
        # Another process may have built it while this one waited for the lock.
        if folder.is_dir():
            return folder
        unfinished = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=root / kind))
        try:
            build(unfinished)
            # mkdtemp creates folders that only this user can read.
            unfinished.chmod(0o755)
            os.rename(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@contextmanager
def _lock(parent: Path, key: str) -> Iterator[None]:
    """Hold the lock of one entry of the cache."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        lock = open(parent / f".{key}.lock", "w")  # noqa: SIM115 (closed by the `with` below)
    except OSError as error:
        raise InputError(
            f"the cache folder {parent} cannot be written ({error.strerror}); set data.cache or"
            " PLAIT_CACHE to a folder that can"
        ) from error
    with lock:
        # The system releases the lock when the process ends, even after SIGKILL.
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
