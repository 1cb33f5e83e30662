"""A folder that a file names for what does not stay in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

from plait.errors import PlaitError


def require_writable(folder: Path, *, field: str) -> None:
    """Make `folder` if need be and write into it. Raises PlaitError, which names `field` of the
    configuration, where that fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PlaitError(
            f"{field} = {str(folder)!r}: {error.strerror}; name a folder that can be written"
        ) from error
