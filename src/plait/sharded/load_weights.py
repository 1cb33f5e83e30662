"""Weights from a Hugging Face folder of safetensors, each rank reading only the slices it holds.

Names in the files must be the model's parameter names (true for most dense families; a family whose
files Transformers converts while loading is refused with the names that differ).
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

from plait._torch.dtensor import local_window
from plait.errors import CheckpointError
from plait.model.tied import tied_names

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAPPED = 64 << 20
"""Bytes that are read before a file is opened anew: what was read of an open one stays mapped, and
would take the memory twice.
"""
_COMPARED = 4 << 20
"""Elements of two tensors that are compared at a time."""
_TICK = 100_000_000
"""Nanoseconds in which a file may change without another time of its last change, at most."""
_AGAIN = "download or save the folder again"


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name to the file that holds it. Raises CheckpointError where the folder holds no
    safetensors that can be read, or two models. Transformers reads SINGLE where there is one, and
    leaves it, or INDEX, when it saves another model in the other way.
    """
    index = folder / INDEX
    single = folder / SINGLE
    if not index.is_file() and not single.is_file():
        remedy = "give a folder written by save_pretrained"
        if pickled := next(
            (path.name for path in sorted(folder.glob("pytorch_model*.bin*"))), None
        ):
            remedy = (
                f"{pickled} is a pickle, which can run code as it is read: {remedy}, from a model"
                " that Transformers has loaded"
            )
        raise CheckpointError(f"{folder}: neither {INDEX} nor {SINGLE} is there; {remedy}")
    table = _weight_map(index) if index.is_file() else {}
    missing = sorted({name for name in table.values() if not (folder / name).is_file()})
    if table and not missing and single.is_file() and set(table.values()) != {SINGLE}:
        raise CheckpointError(
            f"{folder} holds two models: {SINGLE}, and {len(set(table.values()))} files that"
            f" {INDEX} names, and nothing says which one is meant; remove {SINGLE}, or {INDEX} and"
            " its files"
        )
    if single.is_file():
        with opened(single) as file:
            return dict.fromkeys(file.keys(), single)
    if missing:
        raise CheckpointError(
            f"{index}: names files that are not there: {', '.join(missing[:4])}; {_AGAIN}"
        )
    return {tensor: folder / name for tensor, name in table.items()}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is no index of safetensors ({type(error).__name__}: {error}); {_AGAIN}"
        ) from error
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise CheckpointError(
            f"{index} is no index of safetensors: weight_map is not tensors' names to files;"
            f" {_AGAIN}"
        )
    return table


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file. Raises CheckpointError where it, or a tensor that is asked of it, cannot
    be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is no readable safetensors file ({error}); {_AGAIN}"
        ) from error


def load_weights(
    model: nn.Module,
    folder: str | Path,
    *,
    filled: Callable[[torch.Tensor], None] = lambda _: None,
    leaving: Collection[str] = (),
    whole: nn.Module | None = None,
) -> None:
    """Fill every parameter and persistent buffer of `model` (allocated, sharded or not), converting
    to its dtype. `filled` is called with every tensor that has its values. The names in `leaving`
    are in the files, and are not read. `whole` is the uncut model on meta, where `model` is a stage
    of it.

    Each rank reads its own slices only. Raises CheckpointError naming what is missing, left over or
    of another shape.
    """
    folder = Path(folder)
    files = weight_files(folder)
    wanted = model.state_dict(keep_vars=True)
    source = sources_of(whole if whole is not None else model, wanted, files, folder)
    by_file: dict[Path, list[str]] = {}
    for name, stored in source.items():
        if name not in leaving:
            by_file.setdefault(files[stored], []).append(name)
    with torch.no_grad():
        for path, names in by_file.items():
            for some in _few(names, wanted):
                with opened(path) as file:
                    for name in some:
                        read_tensor(file.get_slice(source[name]), wanted[name], name, path)
                        filled(wanted[name])


def _few(names: list[str], wanted: dict[str, torch.Tensor]) -> Iterator[list[str]]:
    """`names` in groups of about MAPPED bytes, or of one tensor."""
    group = []
    size = 0
    for name in names:
        group.append(name)
        size += _mapped(wanted[name])
        if size >= MAPPED:
            yield group
            group = []
            size = 0
    if group:
        yield group


def _mapped(target: torch.Tensor) -> int:
    """Bytes of a file, of the dtype of `target`, that reading this rank's part of it maps: whole
    rows, where it has columns of them too.
    """
    if not isinstance(target, DTensor) or target.ndim == 0:
        return target.nbytes
    rows = local_window(target)[0]
    return (rows.stop - rows.start) * math.prod(target.shape[1:]) * target.element_size()


_OLD_BUFFERS = {
    "rotary_emb.inv_freq": r"rotary_emb\.inv_freq",
    "position_ids": r"(^|\.)position_ids$",
}
"""Ends of names of buffers, which models make themselves, to what they were stored as."""


def sources_of(
    model: nn.Module, wanted: dict[str, torch.Tensor], files: dict[str, Path], folder: Path
) -> dict[str, str]:
    """Return the name in the files of every name in `wanted`.

    It is the same name, the other name of a tied parameter (safetensors stores one of them), or the
    name without the prefix of the base model (`stored_names`).

    Raises:
        CheckpointError: A tensor is missing or left over.
    """
    ties = {name: group for group in tied_names(model) for name in group}
    stored_as = stored_names(model, files)
    known = set(map(stored_as, model.state_dict()))
    source: dict[str, str] = {}
    missing = []
    for name in wanted:
        stored = next(
            (other for other in map(stored_as, (name, *ties.get(name, ()))) if other in files), None
        )
        if stored is None:
            missing.append(name)
        else:
            source[name] = stored
    tied = {stored_as(other) for group in ties.values() for other in group}
    left = sorted(set(files) - known - set(source.values()) - tied)
    is_left_out = _is_left_out(model)
    left = [name for name in left if not is_left_out(name)]
    if missing or left:
        found = (
            [f"lack {len(missing)} of its tensors ({', '.join(missing[:3])})"] if missing else []
        )
        found += (
            [f"hold tensors that it does not have ({len(left)}: {', '.join(left[:3])})"]
            if left
            else []
        )
        raise CheckpointError(
            f'{folder} is not of this model: the files {" and ".join(found)}; check "model_type"'
            " in its config.json; where Transformers converts the files of this family while it"
            " loads them, load it in Python with plait.from_pretrained, which lets it do so, in"
            " full in every process"
        )
    for group in tied_names(model):
        _refuse_unequal([name for name in map(stored_as, group) if name in files], files)
    return source


def stored_names(model: nn.Module, files: Collection[str]) -> Callable[[str], str]:
    """Return a function from a name in the model to the name in the files.

    They differ for a base model that was saved alone, without its prefix: GPT-2's `transformer.h.0`
    is `h.0` in the hub's files of GPT-2 and BLOOM. Transformers goes by the names too.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    has_prefix = any(name.startswith(prefix) for name in files)
    return lambda name: name if has_prefix or prefix == "." else name.removeprefix(prefix)


def _is_left_out(model: nn.Module) -> Callable[[str], bool]:
    """Whether files may hold a tensor of this name that the model does not have, by Transformers'
    rules: layers that its class says it does not use, and buffers that older releases stored.
    """
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    patterns |= {
        pattern
        for end, pattern in _OLD_BUFFERS.items()
        if any(name.endswith(end) for name in buffers)
    }
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def _refuse_unequal(tied: list[str], files: dict[str, Path]) -> None:
    """Raises CheckpointError where tied parameters, of which all of these are in files, have
    several values there.
    """
    for other in tied[1:]:
        paths = files[tied[0]], files[other]
        changed = tuple((path.stat().st_mtime_ns, path.stat().st_size) for path in paths)
        # it may be written again at the same time
        is_new = time.time_ns() - max(when for when, _ in changed) < _TICK
        are_equal = _are_equal.__wrapped__ if is_new else _are_equal
        if not are_equal(paths[0], tied[0], paths[1], other, changed):
            raise CheckpointError(
                f"{paths[1]}: {tied[0]} and {other} are one parameter by config.json, and have two"
                ' values in the files; set "tie_word_embeddings": false in config.json, as'
                " Transformers does when it loads such a folder"
            )


@lru_cache(maxsize=64)
def _are_equal(path: Path, name: str, other_path: Path, other_name: str, _changed: object) -> bool:
    with opened(path) as file, opened(other_path) as other_file:
        first = file.get_slice(name)
        second = other_file.get_slice(other_name)
        shape = first.get_shape()
        if shape != second.get_shape() or not shape:
            return shape == second.get_shape() and bool(
                torch.equal(file.get_tensor(name), other_file.get_tensor(other_name))
            )
        rows = max(1, _COMPARED // math.prod(shape[1:]) if math.prod(shape) else shape[0])
        return all(
            torch.equal(first[at : at + rows], second[at : at + rows])
            for at in range(0, shape[0], rows)
        )


def read_tensor(stored: object, target: torch.Tensor, name: str, path: Path) -> None:
    """Fill `target`, or this rank's part of it, from safetensors' slice `stored` of the file
    `path`, converting to its dtype. Raises CheckpointError for another shape.
    """
    shape = tuple(stored.get_shape())  # type: ignore[attr-defined]
    if shape != tuple(target.shape):
        raise CheckpointError(
            f"{path}: {name} has shape {shape}, the model's is {tuple(target.shape)}; the folder is"
            " of another configuration"
        )
    if not isinstance(target, DTensor):
        target.copy_(stored[...] if shape else stored[...].reshape(()))  # type: ignore[index]
        return
    local = target.to_local()
    if local.numel() == 0:
        return
    local.copy_(stored[local_window(target)])  # type: ignore[index]
