"""A trained model as a folder that `from_pretrained` opens: streamed from a checkpoint of any
layout, a file at a time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from plait.checkpoint import durable
from plait.checkpoint.described import described_model
from plait.checkpoint.folder import Found
from plait.checkpoint.load import Reader
from plait.checkpoint.model_content import START
from plait.checkpoint.windows import dtype_of
from plait.errors import CheckpointError, InputError
from plait.files import is_at, is_only_writer
from plait.model.described import require_transformers
from plait.model.tied import tied_names
from plait.train.folder import GENERATION

FILE_BYTES = 4 << 30
"""Of one file of weights, and so of the memory that exporting takes."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    step: int
    tensors: int
    size: int
    """Bytes of weights."""
    dtype: torch.dtype
    """Of the first of them."""


def export(
    found: Found,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    generation: Path | None = None,
    verify: Callable[[Path], None] | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
    file_bytes: int = FILE_BYTES,
) -> Exported:
    """Write the model of a checkpoint of `plait train`: config.json, safetensors with an index, the
    tokenizer, and a file of settings of generation (`generation`). The checkpoint is verified
    first. `dtype`: of the weights; None keeps the checkpoint's. `progress` gets (bytes written,
    bytes in all). `verify` gets the finished folder before it has its name.

    Raises InputError where `out` exists, CheckpointError for a damaged checkpoint, one that `plait
    train` did not write, and where `verify` does: then no folder is left.
    """
    require_transformers("plait export")
    if out.exists():
        raise InputError(f"--out {out}: exists; give another name, or remove it first")
    reader = Reader(found)
    reader.verify("full")
    model = described_model(found, dtype=dtype)
    stored = dict(reader.under(START))
    of_model = model.state_dict()
    doubles = {
        name for group in tied_names(model) for name in sorted(group, key=list(of_model).index)[1:]
    }
    names = [name for name in stored if name not in doubles]
    missing = sorted(set(of_model) - doubles - set(names))
    if missing:
        raise CheckpointError(
            f"{found.path} lacks {len(missing)} tensors of its model, first {missing[0]}"
        )
    # Another dtype is not all tensors': integers stay, and so does what the class keeps in float32.
    dtypes = {
        name: (
            of_model[name].dtype
            if dtype is not None and name in of_model
            else dtype_of(stored[name])
        )
        for name in names
    }
    sizes = {name: _bytes(stored[name].shape, dtypes[name]) for name in names}
    total = sum(sizes.values())
    done = 0
    temporary = out.with_name(f".{out.name}.tmp")
    held = None
    is_done = False
    try:
        held = _claimed(temporary, out)
        files = _files(sizes, file_bytes)
        index: dict[str, str] = {}
        for number, members in enumerate(files, 1):
            file = (
                "model.safetensors"
                if len(files) == 1
                else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            )
            tensors = {name: reader.read(f"{START}{name}").to(dtypes[name]) for name in members}
            save_file(tensors, temporary / file, metadata={"format": "pt"})
            index |= dict.fromkeys(members, file)
            done += sum(sizes[name] for name in members)
            progress(done, total)
        if len(files) > 1:
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
            (temporary / "model.safetensors.index.json").write_text(text)
        settings: Any = model.config
        settings.architectures = [type(model).__name__]
        settings.dtype = dtype or dtype_of(stored[names[0]])
        settings.use_cache = True
        settings.save_pretrained(temporary)
        if tokenizer is not None and tokenizer.is_dir():
            # several chat templates lie in a folder of their own
            shutil.copytree(tokenizer, temporary, dirs_exist_ok=True)
        if generation is not None:
            shutil.copyfile(generation, temporary / GENERATION)
        _sync(temporary)
        if verify is not None:
            _verify(verify, temporary, out)
        durable.publish(temporary, out)
        is_done = True
    except (OSError, SafetensorError) as error:
        raise InputError(f"--out {out} cannot be written: {_why(error)}") from error
    finally:
        if held is not None:
            if not is_done:  # also after Ctrl-C
                shutil.rmtree(temporary, ignore_errors=True)
            os.close(held)
    return Exported(
        out, int(found.manifest.metadata["global_steps"]), len(names), total, dtypes[names[0]]
    )


def _claimed(temporary: Path, out: Path) -> int:
    """An empty folder, open, which this process alone writes to. What an export that was killed
    left there is removed. Raises InputError where another export is writing it.
    """
    temporary.mkdir(parents=True, exist_ok=True)
    held = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if not is_only_writer(held) or not is_at(temporary, held) or out.exists():
        os.close(held)
        raise InputError(
            f"--out {out}: another export writes it now; wait for its end, or give another name"
        )
    for left in temporary.iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    return held


def _verify(verify: Callable[[Path], None], temporary: Path, out: Path) -> None:
    try:
        verify(temporary)
    except CheckpointError as error:
        raise CheckpointError(
            f"--out {out}: {error}; the folder was removed: without --verify it is kept"
        ) from error


def _sync(folder: Path) -> None:
    """Put the files of a folder on the disk. Raises OSError."""
    for path in folder.rglob("*"):
        if path.is_dir():
            durable.sync_folder(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def _why(error: Exception) -> str:
    """What the system says, and of which file where it is not one of the folder's own."""
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        source, _, reason = error.args[0][0]
        return f"{source}: {reason}"
    return getattr(error, "strerror", None) or str(error)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _files(sizes: dict[str, int], most: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    room = most
    for name, size in sizes.items():
        if files[-1] and size > room:
            files.append([])
            room = most
        files[-1].append(name)
        room -= size
    return files
