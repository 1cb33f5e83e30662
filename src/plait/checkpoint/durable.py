"""Durable writes, renames and deletions of checkpoints: files that a power loss leaves intact.

No other module of the package changes files. All calls go through `plait.checkpoint.files`.

Note [Order of syncs]
    In a file system, every file and its folder are on the disk before a rename publishes them, and
    the rename is on the disk before anything older is deleted. Objects that a store has accepted
    are durable, and they are replaced as a whole or not at all.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

from plait.checkpoint import files
from plait.checkpoint.places import Place, StorePath


class ByteSink(Protocol):
    """Stream that content is written to."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Write all of `data`, or raise OSError."""


@contextmanager
def _add_path_to_errors(path: Path) -> Iterator[None]:
    # Errors of write and fsync do not name the file.
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class _FileSink:
    """Open file whose writes go through `FILES`."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def write(self, data: bytes | memoryview, /) -> None:
        files.FILES.write(self._stream, data)


IS_NO_FILE = "is not a file"
_TEMPORARY_SUFFIXES = (".tmp", ".replaced", ".deleted")


def is_temporary(path: Place) -> bool:
    """Return True for names that a save or a deletion uses temporarily."""
    return path.name.startswith(".") and path.name.endswith(_TEMPORARY_SUFFIXES)


def write_file(path: Place, content: Callable[[ByteSink], None]) -> None:
    """Write a new file and wait until it is on the disk.

    Args:
        path: File that does not exist.
        content: Writes the content to the stream that it receives.

    Raises:
        OSError: The file cannot be written. The error names it.
    """
    if isinstance(path, StorePath):
        path.write(content)
        return
    with _add_path_to_errors(path), files.FILES.create(path) as stream:
        content(_FileSink(stream))
        files.FILES.sync(stream)


def write_text(path: Place, text: str) -> None:
    """Write a new file of text and wait until it is on the disk. Raises OSError."""
    if isinstance(path, StorePath):
        path.put(text.encode())
        return

    def content(stream: ByteSink) -> None:
        stream.write(text.encode())

    write_file(path, content)


def read_bytes(path: Place, *, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes.

    Raises:
        OSError: The file is missing, larger, or not a regular file. Reading a pipe would never end.
    """
    if isinstance(path, Path) and not path.is_file():
        reason = IS_NO_FILE if path.exists() else "No such file or directory"
        raise FileNotFoundError(errno.ENOENT, reason, str(path))

    size = size_of(path)
    if size > most:
        raise OSError(
            errno.EFBIG,
            f"has {size:,} bytes, but Plait writes at most {most:,} bytes to such a file",
            str(path),
        )
    if isinstance(path, StorePath):
        return path.read_bytes()
    return files.FILES.read(path)


def open_to_read(path: Place) -> IO[bytes]:
    """Open a file for reading. Raises OSError."""
    return path.open() if isinstance(path, StorePath) else files.FILES.open(path)


def size_of(path: Place) -> int:
    """Return the size of a file in bytes. Raises OSError."""
    return path.size() if isinstance(path, StorePath) else path.stat().st_size


def size_of_folder(path: Place) -> int:
    """Return the size of a folder's files in bytes; 0 if it is deleted meanwhile."""
    try:
        if isinstance(path, StorePath):
            return sum(path.sizes().values())
        return sum(file.stat(follow_symlinks=False).st_size for file in path.iterdir())
    except FileNotFoundError:
        return 0


def remove(path: Place) -> None:
    """Delete a file, a link, or a folder with everything in it. Raises OSError."""
    if isinstance(path, StorePath):
        path.delete()
    elif path.is_dir() and not path.is_symlink():
        files.FILES.remove_folder(path)
    else:
        files.FILES.unlink(path)


def remove_if_possible(path: Path) -> None:
    """Delete something that only takes up space. Errors are ignored."""
    with suppress(OSError):
        remove(path)


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Make a new folder. Raises OSError.

    Args:
        path: The folder.
        parents: Make missing parents too, and accept an existing folder.
    """
    files.FILES.make_folder(path, parents=parents)


def rename(path: Path, target: Path) -> None:
    """Rename without a sync; the caller syncs the folder. Raises OSError."""
    files.FILES.rename(path, target)


def sync_folder(path: Path) -> None:
    """Wait until a folder's list of names is on the disk. Raises OSError."""
    with _add_path_to_errors(path):
        files.FILES.sync_folder(path)


def publish(temporary: Path, path: Path) -> None:
    """Rename a complete file or folder and sync. An existing file `path` is replaced.

    Raises:
        OSError: A rename or sync failed.
    """
    # See Note [Order of syncs].
    if temporary.is_dir():
        sync_folder(temporary)
    rename(temporary, path)
    sync_folder(path.parent)


def replace_text(path: Place, text: str) -> None:
    """Replace the content of a small file atomically.

    A reader sees the old or the new text, even after a crash.

    Raises:
        OSError: The file cannot be written.
    """
    if isinstance(path, StorePath):
        path.put(text.encode())
        return

    # Two threads may replace it at the same time, so each needs a name of its own.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        write_text(temporary, text)
        publish(temporary, path)
    except OSError:
        remove_if_possible(temporary)
        raise
