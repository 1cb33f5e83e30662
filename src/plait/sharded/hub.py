"""Folders that `save_pretrained` wrote, on this machine or on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from plait.errors import InputError, first_line
from plait.files import is_path, user_path


def saved_folder(name: str | Path, field: str) -> Path:
    """Where the model `name` is on this machine, fetched from the hub if need be. Raises
    InputError, naming `field`, where there is none with weights in safetensors.
    """
    folder = user_path(name, field)
    if not folder.is_dir():
        folder = _fetched(str(name), field)
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        rule = f"{field} = {str(name)!r}: the folder needs config.json and *.safetensors"
        raise InputError(f"{rule}; save the model with save_pretrained")
    return folder


def _fetched(name: str, field: str) -> Path:
    if is_path(name):
        raise InputError(
            f"{field} = {name!r}: there is no such folder; name a folder with config.json and"
            " safetensors weights"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"])
        )
    except Exception as error:  # the hub and the network raise a dozen kinds
        rule = (
            f"{field} = {name!r}: there is no such folder, and it cannot be fetched from the hub"
            f" ({first_line(error)})"
        )
        raise InputError(
            f"{rule}; name a folder with config.json and safetensors weights"
        ) from error
