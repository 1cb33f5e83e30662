"""File system calls of checkpoints, one method per kind of call.

`plait.checkpoint.durable` makes all its calls through `FILES`. Tests replace it by a file system
that is full, slow or read-only, that fails, or that ends the process at one of the calls.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import IO


class Files:
    """File system of this machine. Every method raises OSError."""

    def make_folder(self, path: Path, *, parents: bool = False) -> None:
        """Make a new folder.

        Args:
            path: The folder.
            parents: Make missing parents too, and accept an existing folder.
        """
        path.mkdir(parents=parents, exist_ok=parents)

    def create(self, path: Path) -> IO[bytes]:
        """Create a new file and open it for writing."""
        return open(path, "xb")

    def write(self, stream: IO[bytes], data: bytes | memoryview) -> None:
        """Write all of `data`."""
        stream.write(data)

    def sync(self, stream: IO[bytes]) -> None:
        """Wait until the data that was written is on the disk."""
        stream.flush()
        os.fsync(stream.fileno())

    def sync_folder(self, path: Path) -> None:
        """Wait until a folder's list of names is on the disk."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, path: Path, target: Path) -> None:
        """Rename a folder, or a file, which replaces a file `target`."""
        path.rename(target)

    def unlink(self, path: Path) -> None:
        """Delete a file or a link, if it exists."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Delete a folder and everything in it."""
        shutil.rmtree(path)

    def read(self, path: Path) -> bytes:
        """Return the content of a small file."""
        return path.read_bytes()

    def open(self, path: Path) -> IO[bytes]:
        """Open a file for reading."""
        return open(path, "rb")


FILES: Files = Files()
"""File system that this process uses."""
