"""Folders of torch's distributed checkpoints (`torch.distributed.checkpoint`): tensors by name,
Adam's states where their names say so.
"""

from __future__ import annotations

import io
import re
from math import prod
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.foreign.content import Foreign, Later
from plait.checkpoint.foreign.unpickle import Inert, read_pickle
from plait.checkpoint.shard_file import is_kept
from plait.errors import CheckpointError

_STATE = re.compile(r"(?:^|\.)state\.(.+)\.([A-Za-z_]+)$")
_GROUPED = re.compile(r"(?:^|\.)param_groups\.(.+)\.([A-Za-z_]+)$")
_ROOTS = ("model", "state_dict", "module", "app")


def is_dcp(folder: Path) -> bool:
    """Whether it is such a folder."""
    return (folder / ".metadata").is_file()


def read(folder: Path) -> Foreign:
    """Raises CheckpointError for what is incomplete or of no known form."""
    metadata = read_pickle(folder / ".metadata")
    entries = metadata.get("state_dict_metadata") if isinstance(metadata, Inert) else None
    stored = metadata.get("storage_data") if isinstance(metadata, Inert) else None
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        raise CheckpointError(
            f"{folder / '.metadata'} is not what torch.distributed.checkpoint writes"
        )
    places = {
        (index.get("fqn"), tuple(index.get("offset") or ())): info for index, info in stored.items()
    }
    found = Foreign("torch.distributed.checkpoint")
    values: dict[str, Any] = {}
    names: dict[str, Later] = {}
    for name, entry in entries.items():
        if entry.get("chunks") is None:
            values[name] = _value(folder, places.get((name, ())), found, name)
            continue
        shape = tuple(entry.get("size"))
        dtype = entry.get("properties").state[0]
        if not is_kept(dtype):
            found.left_out.append(f"{name}, which is of {dtype}")
            continue
        chunks = [
            (tuple(chunk.get("offsets")), tuple(chunk.get("sizes")))
            for chunk in entry.get("chunks")
        ]
        names[name] = Later(shape, dtype, _assembled(folder, places, name, shape, dtype, chunks))
    _sort(found, names, values)
    return found


def _assembled(
    folder: Path,
    places: dict[Any, Any],
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    chunks: list[Any],
) -> Any:
    if sum(prod(sizes) for _, sizes in chunks) != prod(shape):
        raise CheckpointError(f"{folder}: the parts of {name} are not its {prod(shape):,} elements")

    def make() -> torch.Tensor:
        full = torch.empty(shape, dtype=dtype)
        for offsets, sizes in chunks:
            part = _load(folder, places.get((name, offsets)), name)
            if not isinstance(part, torch.Tensor) or tuple(part.shape) != sizes:
                raise CheckpointError(f"{folder}: a part of {name} is not of the shape {sizes}")
            full[
                tuple(
                    slice(start, start + size) for start, size in zip(offsets, sizes, strict=True)
                )
            ] = part
        return full

    return make


def _load(folder: Path, info: Any, name: str) -> Any:
    """What is stored in one stretch of a file, with nothing but tensors and plain data."""
    file, offset, length = (
        info.get(key) if isinstance(info, Inert) else None
        for key in ("relative_path", "offset", "length")
    )
    if (
        not isinstance(file, str)
        or Path(file).name != file
        or not isinstance(offset, int)
        or not isinstance(length, int)
    ):
        raise CheckpointError(
            f"{folder}: .metadata does not say where {name} is, or names no file of the folder"
        )
    try:
        with open(folder / file, "rb") as stream:
            stream.seek(offset)
            raw = stream.read(min(length, (folder / file).stat().st_size))
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{folder / file}: {name} cannot be read: {error}") from error


def _value(folder: Path, info: Any, found: Foreign, name: str) -> Any:
    try:
        return _load(folder, info, name)
    except CheckpointError:
        found.left_out.append(f"{name}, which is no plain data")
        return None


def _sort(found: Foreign, names: dict[str, Later], values: dict[str, Any]) -> None:
    """What is the model's, what the optimizer's, and the parameters' groups."""
    model = {name: later for name, later in names.items() if not _STATE.search(name)}
    roots = {name.partition(".")[0] for name in model}
    root = f"{next(iter(roots))}." if len(roots) == 1 and roots <= set(_ROOTS) else ""
    found.tensors |= {f"model.{name.removeprefix(root)}": later for name, later in model.items()}
    for name, later in names.items():
        match = _STATE.search(name)
        if match is not None and f"model.{match[1]}" in found.tensors:
            found.tensors[f"optimizer.state.{match[1]}.{match[2]}"] = later
        elif match is not None:
            found.left_out.append(f"{name}: the model has no {match[1]}")
    settings: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        match = _GROUPED.search(name)
        if name.rpartition(".")[2] == "param_groups" and isinstance(value, list):
            settings |= {f"{name}.{index}": dict(group) for index, group in enumerate(value)}
        elif match is not None:
            settings.setdefault(match[1], {})[match[2]] = value
        elif (
            (matched := _STATE.search(name)) is not None
            and isinstance(value, int | float)
            and matched[2] == "step"
        ):
            step = torch.tensor(float(value))
            found.tensors[f"optimizer.state.{matched[1]}.step"] = Later.of(step)
        elif value is not None:
            found.left_out.append(name)
    for key, values_of in settings.items():
        params = values_of.pop("params", [key])
        params = [params] if isinstance(params, str) else list(params)
        kept = {
            name: value
            for name, value in values_of.items()
            if isinstance(value, int | float | bool | tuple | list | None)
        }
        alike = next(
            (
                group
                for group in found.groups
                if {k: v for k, v in group.items() if k != "params"} == kept
            ),
            None,
        )
        if alike is None:
            found.groups.append({**kept, "params": params})
        else:
            alike["params"] += params
    if not found.groups and any(name.startswith("optimizer.") for name in found.tensors):
        found.groups = [
            {
                "params": [
                    name.removeprefix("model.")
                    for name in found.tensors
                    if name.startswith("model.")
                ]
            }
        ]
    if not any(name.endswith(".exp_avg") for name in found.tensors):
        found.left_out.append("an optimizer: no states of Adam are there by name")
