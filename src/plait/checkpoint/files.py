"""What checkpoints ask of a file system, a method for each kind of call, and nothing else.

`durable` calls `FILES`; a test puts something in its place that is full, slow, read-only, fails, or
ends the process at one of the calls.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import IO


class Files:
    """The machine's own. Every method raises OSError."""

    def make_folder(self, path: Path, *, parents: bool = False) -> None:
        """A new folder; with `parents` also those above it, and one that is there is left as it
        is.
        """
        path.mkdir(parents=parents, exist_ok=parents)

    def create(self, path: Path) -> IO[bytes]:
        """A new file, to be written."""
        return open(path, "xb")

    def write(self, stream: IO[bytes], data: bytes | memoryview) -> None:
        """All of it."""
        stream.write(data)

    def sync(self, stream: IO[bytes]) -> None:
        """Put what was written on the disk."""
        stream.flush()
        os.fsync(stream.fileno())

    def sync_folder(self, path: Path) -> None:
        """Put a folder's list of names on the disk."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, path: Path, target: Path) -> None:
        """A file, in place of one that has the name, or a folder."""
        path.rename(target)

    def unlink(self, path: Path) -> None:
        """A file or a link; nothing where there is none."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """With all that is in it."""
        shutil.rmtree(path)

    def read(self, path: Path) -> bytes:
        """A small file."""
        return path.read_bytes()

    def open(self, path: Path) -> IO[bytes]:
        """A file, to be read."""
        return open(path, "rb")


FILES: Files = Files()
"""This process's."""
