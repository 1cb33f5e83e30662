"""Checkpoints of `torch.distributed.checkpoint`.

Tensors are read by name. Adam's states are recognised by names such as
`optimizer.state.PARAMETER.exp_avg`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.foreign.content import ForeignCheckpoint, LazyTensor
from plait.checkpoint.foreign.unpickle import Inert, read_pickle
from plait.checkpoint.format import is_supported_dtype
from plait.errors import CheckpointError

_STATE = re.compile(r"(?:^|\.)state\.(.+)\.([A-Za-z_]+)$")
_GROUPED = re.compile(r"(?:^|\.)param_groups\.(.+)\.([A-Za-z_]+)$")
_ROOTS = ("model", "state_dict", "module", "app")
"""Prefixes under which scripts store a model."""
_REMEDY = "copy the complete checkpoint again, or save it again"


def is_dcp(folder: Path) -> bool:
    """Return True if torch.distributed.checkpoint wrote the folder."""
    return (folder / ".metadata").is_file()


def read(folder: Path) -> ForeignCheckpoint:
    """Read the metadata of a checkpoint. Tensors are read when they are assembled.

    Raises:
        CheckpointError: The checkpoint is incomplete or has an unknown form.
    """
    metadata = read_pickle(folder / ".metadata")
    entries = metadata.get("state_dict_metadata") if isinstance(metadata, Inert) else None
    stored = metadata.get("storage_data") if isinstance(metadata, Inert) else None
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        raise CheckpointError(
            f"{folder / '.metadata'} is not a file of torch.distributed.checkpoint; {_REMEDY}"
        )
    locations = {
        (index.get("fqn"), tuple(index.get("offset") or ())): info for index, info in stored.items()
    }
    checkpoint = ForeignCheckpoint("torch.distributed.checkpoint")
    values: dict[str, Any] = {}
    tensors: dict[str, LazyTensor] = {}
    for name, entry in entries.items():
        if entry.get("chunks") is None:
            values[name] = _read_value(folder, locations.get((name, ())), checkpoint, name)
            continue
        shape = tuple(entry.get("size"))
        dtype = entry.get("properties").state[0]
        if not is_supported_dtype(dtype):
            checkpoint.left_out.append(f"{name}, which is of {dtype}")
            continue
        chunks = [
            (tuple(chunk.get("offsets")), tuple(chunk.get("sizes")))
            for chunk in entry.get("chunks")
        ]
        assemble = _assembler(folder, locations, name, shape, dtype, chunks)
        tensors[name] = LazyTensor(shape, dtype, assemble)

    _add_tensors(checkpoint, tensors)
    _add_values(checkpoint, values)
    return checkpoint


def _assembler(
    folder: Path,
    locations: dict[Any, Any],
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    chunks: list[Any],
) -> Callable[[], torch.Tensor]:
    """Return a function that reads a tensor from its chunks, which are pairs (offsets, sizes)."""
    # Checked before memory is allocated: elements without a chunk would be uninitialized.
    elements = sum(prod(sizes) for _, sizes in chunks)
    if elements != prod(shape):
        raise CheckpointError(
            f"{folder}: the chunks of {name} have {elements:,} elements in all, but the tensor has"
            f" {prod(shape):,}; {_REMEDY}"
        )

    def assemble() -> torch.Tensor:
        full = torch.empty(shape, dtype=dtype)
        for offsets, sizes in chunks:
            chunk = _load(folder, locations.get((name, offsets)), name)
            if not isinstance(chunk, torch.Tensor) or tuple(chunk.shape) != sizes:
                raise CheckpointError(
                    f"{folder}: a chunk of {name} does not have the shape {sizes} that .metadata"
                    f" lists; {_REMEDY}"
                )
            target = tuple(
                slice(start, start + size) for start, size in zip(offsets, sizes, strict=True)
            )
            full[target] = chunk
        return full

    return assemble


def _load(folder: Path, info: Any, name: str) -> Any:
    """Load an entry from its range of a file. Only tensors and plain data are allowed."""
    file = offset = length = None
    if isinstance(info, Inert):
        file = info.get("relative_path")
        offset = info.get("offset")
        length = info.get("length")
    if (
        not isinstance(file, str)
        or Path(file).name != file  # a path could leave the folder
        or not isinstance(offset, int)
        or not isinstance(length, int)
    ):
        raise CheckpointError(
            f"{folder}: .metadata does not say which file of this folder contains {name}; {_REMEDY}"
        )
    try:
        with open(folder / file, "rb") as stream:
            stream.seek(offset)
            # The length is limited before memory is allocated for it.
            raw = stream.read(min(length, (folder / file).stat().st_size))
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{folder / file}: {name} cannot be read: {error}; {_REMEDY}"
        ) from error


def _read_value(folder: Path, info: Any, checkpoint: ForeignCheckpoint, name: str) -> Any:
    try:
        return _load(folder, info, name)
    except CheckpointError:
        checkpoint.left_out.append(f"{name}, which is not plain data")
        return None


def _add_tensors(checkpoint: ForeignCheckpoint, tensors: dict[str, LazyTensor]) -> None:
    """Add the tensors of the model, without the script's prefix, and those of the optimizer."""
    model = {name: tensor for name, tensor in tensors.items() if not _STATE.search(name)}
    roots = {name.partition(".")[0] for name in model}
    prefix = ""
    if len(roots) == 1 and roots <= set(_ROOTS):
        prefix = f"{roots.pop()}."
    for name, tensor in model.items():
        checkpoint.tensors[f"model.{name.removeprefix(prefix)}"] = tensor

    for name, tensor in tensors.items():
        match = _STATE.search(name)
        if match is None:
            continue
        if f"model.{match[1]}" in checkpoint.tensors:
            checkpoint.tensors[f"optimizer.state.{match[1]}.{match[2]}"] = tensor
        else:
            checkpoint.left_out.append(f"{name}: the model has no {match[1]}")


def _add_values(checkpoint: ForeignCheckpoint, values: dict[str, Any]) -> None:
    """Add parameter groups and step counts to `checkpoint`."""
    settings: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        grouped = _GROUPED.search(name)
        state = _STATE.search(name)
        if name.rpartition(".")[2] == "param_groups" and isinstance(value, list):
            settings |= {f"{name}.{index}": dict(group) for index, group in enumerate(value)}
        elif grouped is not None:
            settings.setdefault(grouped[1], {})[grouped[2]] = value
        elif state is not None and isinstance(value, int | float) and state[2] == "step":
            step = torch.tensor(float(value))
            checkpoint.tensors[f"optimizer.state.{state[1]}.step"] = LazyTensor.from_tensor(step)
        elif value is not None:
            checkpoint.left_out.append(name)

    for key, group in settings.items():
        _add_group(checkpoint, key, group)
    if not checkpoint.groups and any(name.startswith("optimizer.") for name in checkpoint.tensors):
        params = [
            name.removeprefix("model.") for name in checkpoint.tensors if name.startswith("model.")
        ]
        checkpoint.groups = [{"params": params}]
    if not any(name.endswith(".exp_avg") for name in checkpoint.tensors):
        checkpoint.left_out.append(
            "an optimizer: no tensor has the name of a state of Adam (exp_avg)"
        )


def _add_group(checkpoint: ForeignCheckpoint, key: str, group: dict[str, Any]) -> None:
    """Add a parameter group. Groups with equal values become one.

    Flattened checkpoints have one group per parameter, with the parameter's name as `key`.
    """
    params = group.pop("params", [key])
    params = [params] if isinstance(params, str) else list(params)
    plain = {}
    for name, value in group.items():
        if isinstance(value, int | float | bool | tuple | list | None):
            plain[name] = value
    for other in checkpoint.groups:
        if {name: value for name, value in other.items() if name != "params"} == plain:
            other["params"] += params
            return
    checkpoint.groups.append({**plain, "params": params})
