"""Output files that the user names with an option of a command."""

from __future__ import annotations

from pathlib import Path

from plait.errors import InputError


def require_writable(option: str, path: Path | None, *, make_folder: bool = False) -> None:
    """Check that a file can be written, before a command does work that takes time.

    Args:
        option: Name of the option, for the message.
        path: The file. None if the option was not used.
        make_folder: Whether to create the folder of the file. Nothing else is left behind.

    Raises:
        InputError: The file cannot be written.
    """
    if path is None:
        return
    try:
        if path.is_dir():
            raise InputError(f"{option} {path}: is a folder; give the name of a file in it")
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.is_dir():
            raise InputError(
                f"{option} {path}: there is no folder {path.parent}; make it first (mkdir -p"
                f" {path.parent})"
            )
        existed = path.exists()
        # Opening creates the file, which must not remain if the command fails later.
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be written ({error.strerror})") from None


def write_text(option: str, path: Path, text: str) -> None:
    """Write a file.

    Raises:
        InputError: The file cannot be written. The message names the option.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be written ({error.strerror})") from None
