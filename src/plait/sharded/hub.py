"""Folders of `save_pretrained`, on this machine or on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from plait.errors import InputError, first_line
from plait.files import is_path, user_path


def saved_folder(name: str | Path, field: str) -> Path:
    """Return the folder of a saved model on this machine. Fetches it from the hub if necessary.

    Args:
        name: A folder, or the model's name on the hub.
        field: Setting or call that the name comes from, for messages.

    Raises:
        InputError: There is no such folder, or it has no weights in safetensors.
    """
    folder = user_path(name, field)
    if not folder.is_dir():
        folder = _fetch(str(name), field)
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        rule = f"{field} = {str(name)!r}: the folder needs config.json and *.safetensors"
        raise InputError(f"{rule}; save the model with save_pretrained")
    return folder


def _fetch(name: str, field: str) -> Path:
    remedy = "name a folder with config.json and safetensors weights"
    if is_path(name):
        raise InputError(f"{field} = {name!r}: there is no such folder; {remedy}")

    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"])
        )
    except Exception as error:
        # The hub and the network raise a dozen classes.
        rule = (
            f"{field} = {name!r}: there is no such folder, and it cannot be fetched from the hub"
            f" ({first_line(error)})"
        )
        raise InputError(f"{rule}; {remedy}") from error
