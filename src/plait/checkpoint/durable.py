"""Files that survive a loss of power: what is named is on the disk. The one place where checkpoints
write, rename and delete, by `files`.

In a file system the order is: every file and its folder are on the disk before a rename publishes
them, and the rename is on the disk before anything old is deleted. What an object store has taken
is durable, and its objects change whole or not at all.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

from plait.checkpoint import files
from plait.checkpoint.places import Place, StorePath


class Writing(Protocol):
    """What content is written to."""

    def write(self, data: bytes | memoryview, /) -> object:
        """All of it, or OSError."""


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An OSError of a write or a sync does not know of what."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class _Stream:
    """A file that is being written."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def write(self, data: bytes | memoryview, /) -> None:
        files.FILES.write(self._stream, data)


IS_NO_FILE = "is no file"
TEMPORARY = (".tmp", ".replaced", ".deleted")


def is_temporary(path: Place) -> bool:
    """Whether a name is one that saving and deleting use on the way."""
    return path.name.startswith(".") and path.name.endswith(TEMPORARY)


def write_file(path: Place, content: Callable[[Writing], None]) -> None:
    """Write a new file and put it on the disk. Raises OSError, naming it."""
    if isinstance(path, StorePath):
        path.write(content)
        return
    with _naming(path), files.FILES.create(path) as stream:
        content(_Stream(stream))
        files.FILES.sync(stream)


def write_text(path: Place, text: str) -> None:
    """`write_file` of a text."""
    if isinstance(path, StorePath):
        path.put(text.encode())
        return

    def content(stream: Writing) -> None:
        stream.write(text.encode())

    write_file(path, content)


def read_bytes(path: Place, *, most: int) -> bytes:
    """A file of at most `most` bytes. Raises OSError, also for what is longer or no file: a pipe
    would never end.
    """
    if isinstance(path, Path) and not path.is_file():
        raise FileNotFoundError(
            2, IS_NO_FILE if path.exists() else "No such file or directory", str(path)
        )
    if (size := size_of(path)) > most:
        raise OSError(
            27,
            f"has {size:,} bytes, and what Plait writes there never has more than {most:,}",
            str(path),
        )
    return path.read_bytes() if isinstance(path, StorePath) else files.FILES.read(path)


def open_to_read(path: Place) -> IO[bytes]:
    """A file's bytes. Raises OSError."""
    return path.open() if isinstance(path, StorePath) else files.FILES.open(path)


def size_of(path: Place) -> int:
    """Bytes of a file. Raises OSError."""
    return path.size() if isinstance(path, StorePath) else path.stat().st_size


def size_of_folder(path: Place) -> int:
    """Bytes of the files in it; a run may be deleting it."""
    try:
        return (
            sum(path.sizes().values())
            if isinstance(path, StorePath)
            else sum(f.stat(follow_symlinks=False).st_size for f in path.iterdir())
        )
    except FileNotFoundError:
        return 0


def remove(path: Place) -> None:
    """Delete a file, a link, or a folder with all that is in it. Raises OSError."""
    if isinstance(path, StorePath):
        path.delete()
    elif path.is_dir() and not path.is_symlink():
        files.FILES.remove_folder(path)
    else:
        files.FILES.unlink(path)


def remove_if_possible(path: Path) -> None:
    """`remove` of what takes room and nothing else."""
    with suppress(OSError):
        remove(path)


def make_folder(path: Path, *, parents: bool = False) -> None:
    """A new folder; with `parents` one that may be there, and those above it. Raises OSError."""
    files.FILES.make_folder(path, parents=parents)


def rename(path: Path, target: Path) -> None:
    """Not on the disk before the folder is. Raises OSError."""
    files.FILES.rename(path, target)


def sync_folder(path: Path) -> None:
    """Put a folder's list of names on the disk. Raises OSError."""
    with _naming(path):
        files.FILES.sync_folder(path)


def publish(temporary: Path, path: Path) -> None:
    """Rename a file or folder that is complete; a file that has the name is replaced. Raises
    OSError.
    """
    if temporary.is_dir():
        sync_folder(temporary)
    rename(temporary, path)
    sync_folder(path.parent)


def replace_text(path: Place, text: str) -> None:
    """A small file with new content: a reader, also after a crash, finds the old text or the new
    one. Raises OSError.
    """
    if isinstance(path, StorePath):
        path.put(text.encode())
        return
    # two threads may be writing it
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        write_text(temporary, text)
        publish(temporary, path)
    except OSError:
        remove_if_possible(temporary)
        raise
