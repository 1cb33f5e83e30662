"""Check of folders that a configuration names."""

from __future__ import annotations

import tempfile
from pathlib import Path

from plait.errors import PlaitError


def require_writable(folder: Path, *, field: str) -> None:
    """Create a folder if it does not exist, and write a temporary file to it.

    Args:
        folder: The folder.
        field: The setting that names it, for the error.

    Raises:
        PlaitError: The folder cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PlaitError(
            f"{field} = {str(folder)!r}: {error.strerror}; name a folder that can be written"
        ) from error
