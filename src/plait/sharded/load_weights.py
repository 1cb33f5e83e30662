"""Weights from a Hugging Face folder of safetensors. Each rank reads only the slices that it holds.

Names in the files must be the model's parameter names. That is true for most dense families. If
Transformers converts the files of a family while it loads them, the folder is refused, and the
error lists names that differ.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from plait._torch.tensors import local_window
from plait.errors import CheckpointError
from plait.model.layers import tied_names

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAPPED_BYTES = 64 << 20
"""Number of bytes that are read before a file is opened again.

The pages that were read of an open file stay mapped, so without this limit the weights would take
twice their memory.
"""
_COMPARED_ELEMENTS = 4 << 20
"""Number of elements of two tensors that are compared at a time."""
_CLOCK_TICK_NS = 100_000_000
"""Longest time in which a file may change without a new modification time."""
_DOWNLOAD_AGAIN = "download or save the folder again"


def weight_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in a folder, keyed by the tensor's name.

    Raises:
        CheckpointError: The folder has no readable safetensors, or files of two models.
    """
    index = folder / INDEX_FILE
    single = folder / SINGLE_FILE
    if not index.is_file() and not single.is_file():
        _raise_missing(folder)
    table: dict[str, str] = {}
    if index.is_file():
        table = _weight_map(index)
    missing = sorted({name for name in table.values() if not (folder / name).is_file()})

    # Transformers reads SINGLE if it exists. It leaves SINGLE, or INDEX, in the folder if it later
    # saves another model in the other form.
    if table and not missing and single.is_file() and set(table.values()) != {SINGLE_FILE}:
        raise CheckpointError(
            f"{folder} holds two models: {SINGLE_FILE}, and {len(set(table.values()))} files that"
            f" {INDEX_FILE} lists, and it is not known which one is current; remove {SINGLE_FILE},"
            f" or {INDEX_FILE} and its files"
        )
    if single.is_file():
        with open_safetensors(single) as file:
            return dict.fromkeys(file.keys(), single)
    if missing:
        raise CheckpointError(
            f"{index}: lists files that do not exist: {', '.join(missing[:4])}; {_DOWNLOAD_AGAIN}"
        )
    return {tensor: folder / name for tensor, name in table.items()}


def _raise_missing(folder: Path) -> None:
    remedy = "pass a folder written by save_pretrained"
    pickles = sorted(folder.glob("pytorch_model*.bin*"))
    if pickles:
        remedy = (
            f"{pickles[0].name} is a pickle, which can run code as it is read: {remedy}, from a"
            " model that Transformers has loaded"
        )
    raise CheckpointError(f"{folder}: neither {INDEX_FILE} nor {SINGLE_FILE} is there; {remedy}")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is not a safetensors index ({type(error).__name__}: {error});"
            f" {_DOWNLOAD_AGAIN}"
        ) from error
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise CheckpointError(
            f"{index} is not a safetensors index: weight_map does not map tensor names to files;"
            f" {_DOWNLOAD_AGAIN}"
        )
    return table


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file inside the context.

    Raises:
        CheckpointError: The file, or a tensor that is requested from it, cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file ({error}); {_DOWNLOAD_AGAIN}"
        ) from error


def load_weights(
    model: nn.Module,
    folder: str | Path,
    *,
    filled: Callable[[torch.Tensor], None] = lambda _: None,
    unsplit_model: nn.Module | None = None,
) -> None:
    """Fill every parameter and persistent buffer of a model from a folder.

    Each rank reads its own slices only. Values are converted to the dtype of the filled tensor.

    Args:
        model: The model, sharded or not, with allocated tensors.
        folder: Folder of safetensors.
        filled: Called with each tensor of the model after its values were written.
        unsplit_model: The model on meta, if `model` is a stage of it.

    Raises:
        CheckpointError: Tensors are missing, unexpected or of another shape. The error names them.
    """
    folder = Path(folder)
    files = weight_files(folder)
    targets = model.state_dict(keep_vars=True)
    if unsplit_model is None:
        unsplit_model = model
    sources = sources_of(unsplit_model, targets, files, folder)

    # File by file, so that each is opened as rarely as `_MAPPED_BYTES` allows.
    names_in_file: dict[Path, list[str]] = {}
    for name, stored_name in sources.items():
        names_in_file.setdefault(files[stored_name], []).append(name)
    with torch.no_grad():
        for path, names in names_in_file.items():
            for batch in _in_batches(names, targets):
                with open_safetensors(path) as file:
                    for name in batch:
                        read_tensor(file.get_slice(sources[name]), targets[name], name, path)
                        filled(targets[name])


def _in_batches(names: list[str], targets: dict[str, torch.Tensor]) -> Iterator[list[str]]:
    """Yield lists of names whose tensors map about `_MAPPED_BYTES` together.

    A list may end with one larger tensor.
    """
    batch = []
    size = 0
    for name in names:
        batch.append(name)
        size += _mapped_bytes(targets[name])
        if size >= _MAPPED_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _mapped_bytes(target: torch.Tensor) -> int:
    """Return the bytes of a file that are mapped to read this rank's slice of a tensor.

    A slice of columns maps complete rows. The file is assumed to have the dtype of the target.
    """
    if not isinstance(target, DTensor) or target.ndim == 0:
        return target.nbytes
    rows = local_window(target)[0]
    return (rows.stop - rows.start) * math.prod(target.shape[1:]) * target.element_size()


_OLD_BUFFERS = {
    "rotary_emb.inv_freq": r"rotary_emb\.inv_freq",
    "position_ids": r"(^|\.)position_ids$",
}
"""Buffers that models compute themselves and that older releases of Transformers stored.

Maps the end of a buffer's name in the model to a pattern of names in files.
"""


def sources_of(
    model: nn.Module, targets: dict[str, torch.Tensor], files: dict[str, Path], folder: Path
) -> dict[str, str]:
    """Return the name in the files for every name in `targets`.

    The two names are equal, unless the file has the other name of a tied parameter (safetensors
    stores one of them) or the name without the prefix of the base model (`stored_names`).

    Args:
        model: The unsplit model.
        targets: Tensors to fill, keyed by their names in the model.
        files: The result of `weight_files`.
        folder: The folder, for messages.

    Raises:
        CheckpointError: A tensor is missing or left over, or tied parameters have two values.
    """
    ties = {name: group for group in tied_names(model) for name in group}
    stored_name = stored_names(model, files)
    sources: dict[str, str] = {}
    missing = []
    for name in targets:
        candidates = map(stored_name, (name, *ties.get(name, ())))
        source = next((candidate for candidate in candidates if candidate in files), None)
        if source is None:
            missing.append(name)
        else:
            sources[name] = source

    known = set(map(stored_name, model.state_dict()))
    tied = {stored_name(name) for group in ties.values() for name in group}
    may_ignore = _ignored_names(model)
    unknown = set(files) - known - set(sources.values()) - tied
    left_over = sorted(name for name in unknown if not may_ignore(name))

    if missing or left_over:
        _raise_misfit(folder, missing, left_over)
    for group in tied_names(model):
        _refuse_unequal([name for name in map(stored_name, group) if name in files], files)
    return sources


def _raise_misfit(folder: Path, missing: list[str], left_over: list[str]) -> None:
    problems = []
    if missing:
        problems.append(f"lack {len(missing)} of its tensors ({', '.join(missing[:3])})")
    if left_over:
        problems.append(
            f"hold tensors that it does not have ({len(left_over)}: {', '.join(left_over[:3])})"
        )
    raise CheckpointError(
        f'{folder} is not of this model: the files {" and ".join(problems)}; check "model_type"'
        " in its config.json; if Transformers converts the files of this family while it loads"
        " them, create the model in Python with plait.from_pretrained: Transformers then loads"
        " it in full in every process"
    )


def stored_names(model: nn.Module, files: Collection[str]) -> Callable[[str], str]:
    """Return a function that maps a name in the model to the name in the files.

    The names differ for a base model that was saved by itself, without its prefix: GPT-2's
    `transformer.h.0` is `h.0` in the hub's files of GPT-2 and BLOOM. Like Transformers,
    this function recognises such files from the names.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    has_prefix = any(name.startswith(prefix) for name in files)
    return lambda name: name if has_prefix or prefix == "." else name.removeprefix(prefix)


def _ignored_names(model: nn.Module) -> Callable[[str], bool]:
    """Return a predicate that is True for names of stored tensors that the model need not have.

    As in Transformers, these are tensors that the model's class declares as unused, and those in
    `_OLD_BUFFERS`.
    """
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    for end, pattern in _OLD_BUFFERS.items():
        if any(name.endswith(end) for name in buffers):
            patterns.add(pattern)
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def _refuse_unequal(tied: list[str], files: dict[str, Path]) -> None:
    """Raise CheckpointError if tied parameters have several values in the files.

    Args:
        tied: Names in the files that all stand for one parameter of the model.
        files: The result of `weight_files`.
    """
    for other in tied[1:]:
        paths = files[tied[0]], files[other]
        # The modification times and sizes are a part of the cache's key.
        versions = tuple((path.stat().st_mtime_ns, path.stat().st_size) for path in paths)
        # A new file may be written again with the same modification time.
        is_new = time.time_ns() - max(versions)[0] < _CLOCK_TICK_NS
        are_equal = _are_equal.__wrapped__ if is_new else _are_equal
        if not are_equal(paths[0], tied[0], paths[1], other, versions):
            raise CheckpointError(
                f"{paths[1]}: {tied[0]} and {other} are tied by config.json, but have different"
                ' values in the files; set "tie_word_embeddings": false in config.json, as'
                " Transformers does when it loads such a folder"
            )


@lru_cache(maxsize=64)
def _are_equal(path: Path, name: str, other_path: Path, other_name: str, _versions: object) -> bool:
    with open_safetensors(path) as file, open_safetensors(other_path) as other_file:
        first = file.get_slice(name)
        second = other_file.get_slice(other_name)
        shape = first.get_shape()
        if shape != second.get_shape():
            return False
        if not shape:
            return torch.equal(file.get_tensor(name), other_file.get_tensor(other_name))

        # A few rows at a time: both tensors in full would take twice their memory.
        step = shape[0]
        if math.prod(shape):
            step = _COMPARED_ELEMENTS // math.prod(shape[1:])
        step = max(1, step)
        return all(
            torch.equal(first[start : start + step], second[start : start + step])
            for start in range(0, shape[0], step)
        )


def read_tensor(stored: object, target: torch.Tensor, name: str, path: Path) -> None:
    """Fill a tensor, or this rank's shard of it, from a slice of safetensors.

    Args:
        stored: Slice of safetensors' `get_slice`.
        target: A tensor or DTensor of the same shape. Values are converted to its dtype.
        name: Name of the tensor, for messages.
        path: The file, for messages.

    Raises:
        CheckpointError: The shapes differ.
    """
    shape = tuple(stored.get_shape())  # type: ignore[attr-defined]
    if shape != tuple(target.shape):
        raise CheckpointError(
            f"{path}: {name} has shape {shape}, and the model's is {tuple(target.shape)}; build the"
            " model from the config.json of this folder"
        )
    if not isinstance(target, DTensor):
        target.copy_(stored[...].reshape(shape))  # type: ignore[index]
        return
    local = target.to_local()
    if local.numel() == 0:
        return
    local.copy_(stored[local_window(target)])  # type: ignore[index]
