"""Files and renames that survive a loss of power: what is named is on the disk. The one place where checkpoints write.

The order is: every file and its folder are on the disk before a rename publishes them, and the rename is on the disk before anything old is
deleted.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Writing(Protocol):
    """What content is written to."""

    def write(self, data: bytes | memoryview, /) -> object:
        """All of it, or OSError."""


TEMPORARY = (".tmp", ".replaced", ".deleted")


def is_temporary(path: Path) -> bool:
    """Whether a name is one that saving and deleting use on the way."""
    return path.name.startswith(".") and path.name.endswith(TEMPORARY)


def write_file(path: Path, content: Callable[[Writing], None]) -> None:
    """Write a new file and put it on the disk. Raises OSError."""
    with open(path, "xb") as stream:
        content(stream)
        stream.flush()
        os.fsync(stream.fileno())


def write_text(path: Path, text: str) -> None:
    """`write_file` of a text."""

    def content(stream: Writing) -> None:
        stream.write(text.encode())

    write_file(path, content)


def remove(path: Path) -> None:
    """Delete a file, a link, or a folder with all that is in it. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Put a folder's list of names on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(temporary: Path, path: Path) -> None:
    """Rename a file or folder that is complete; a file that has the name is replaced. Raises OSError."""
    if temporary.is_dir():
        sync_folder(temporary)
    temporary.rename(path)
    sync_folder(path.parent)


def replace_text(path: Path, text: str) -> None:
    """A small file with new content: a reader, also after a crash, finds the old text or the new one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")  # two threads may be writing it
    write_text(temporary, text)
    publish(temporary, path)
