"""Files that a command writes because an option names them."""

from __future__ import annotations

from pathlib import Path

from plait.errors import InputError


def require_writable(option: str, path: Path | None, *, make_folder: bool = False) -> None:
    """Find out whether a file can be written before anything takes time; no trace is left of that,
    but with make_folder its folder. Raises InputError.
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
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be written ({error.strerror})") from None


def write_text(option: str, path: Path, text: str) -> None:
    """Write a file. Raises InputError that names the option where that cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be written ({error.strerror})") from None
