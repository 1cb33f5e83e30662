"""Training checkpoints by torch's distributed checkpoint (DCP): sharded files that load on any layout.

A checkpoint is a folder `<tag>`, written under a temporary name and renamed when every rank has finished, then named in the file
`latest`. A reader therefore never sees half a checkpoint. Tensors are keyed by parameter name; the rest (steps, data position,
configuration) is `plait.json`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from plait.errors import CheckpointError

LATEST = "latest"
METADATA = "plait.json"


def save(
    folder: Path,
    tag: str,
    *,
    model: nn.Module,
    optimizer: Mapping[str, torch.Tensor],
    random: dict[str, torch.Tensor],
    metadata: dict[str, Any],
    per_rank_state: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write `folder/tag`. Collective; returns when it is complete on disk and named in `latest`.

    `optimizer` holds its states by name (`optimizer_content`), `random` this rank's generator states under keys that are unique to the
    rank, `per_rank_state` whatever else only this rank has; `metadata` must be JSON, and the first rank's are written.
    """
    target, temporary = folder / tag, folder / f".{tag}.part"
    if _first():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
    _barrier()
    state: dict[str, Any] = {"model": get_model_state_dict(model), "random": random, "optimizer": dict(optimizer)}
    if per_rank_state:
        state["per_rank_state"] = {f"{_rank()}.{name}": tensor for name, tensor in per_rank_state.items()}
    dcp.save(state, checkpoint_id=temporary)
    if _first():
        (temporary / METADATA).write_text(json.dumps(metadata, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        _write_latest(folder, tag)
    _barrier()
    return target


def find(folder: Path, tag: str | None = None) -> Path | None:
    """The checkpoint `tag`, or the latest; None where there is none. A named one that is missing is an error."""
    if tag is None:
        pointer = folder / LATEST
        if not pointer.is_file():
            return None
        tag = pointer.read_text().strip()
    found = folder / tag
    if not (found / METADATA).is_file():
        have = sorted(path.parent.name for path in folder.glob(f"*/{METADATA}"))
        raise CheckpointError(f"{found}: no complete checkpoint there; {folder} holds {', '.join(have) or 'none'}")
    return found


def read_metadata_file(checkpoint: Path) -> dict[str, Any]:
    """The JSON side of a checkpoint."""
    return dict(json.loads((checkpoint / METADATA).read_text()))


def read_stored(checkpoint: Path) -> dict[str, Any]:
    """What tensors a checkpoint holds: name to shape and dtype."""
    return dict(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)


def check(checkpoint: Path, stored: Mapping[str, Any], *, model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise CheckpointError where checkpoint and model do not have the same tensors, naming the first; nothing is changed. Collective over
    `group`, the ranks that hold different parts of the model."""
    here = {name: tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else None for name, tensor in get_model_state_dict(model).items()}
    if group is not None:
        parts: list[dict[str, Any]] = [{} for _ in range(group.size())]
        dist.all_gather_object(parts, here, group=group)
        here = {name: shape for part in parts for name, shape in part.items()}
    there = {
        name.removeprefix("model."): tuple(meta.size) if isinstance(meta, TensorStorageMetadata) else None
        for name, meta in stored.items()
        if name.startswith("model.")
    }
    _refuse_other_names(checkpoint, "lacks", [name for name in here if name not in there], "this model has")
    _refuse_other_names(checkpoint, "has", [name for name in there if name not in here], "this model lacks")
    for name, shape in here.items():
        if there[name] != shape:
            raise CheckpointError(f"{checkpoint} is of another model: {name} has shape {there[name]} there and {shape} here")


def load(checkpoint: Path, *, model: nn.Module, optimizer: Mapping[str, torch.Tensor], random: Mapping[str, torch.Tensor]) -> None:
    """Fill the model, `optimizer`'s states and `random` in place, whatever layout they were saved on. Collective."""
    state: dict[str, Any] = {"model": get_model_state_dict(model), "optimizer": dict(optimizer), "random": dict(random)}
    dcp.load(state, checkpoint_id=checkpoint)
    set_model_state_dict(model, state["model"])


def load_per_rank_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """What this rank saved as `per_rank_state`, by name; empty where it saved nothing. Collective."""
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    start = f"per_rank_state.{_rank()}."
    if not any(key.startswith("per_rank_state.") for key in stored):
        return {}
    mine = {
        key.removeprefix("per_rank_state."): torch.empty(tuple(tensor.size), dtype=tensor.properties.dtype)
        for key, tensor in stored.items()
        if key.startswith(start) and isinstance(tensor, TensorStorageMetadata)
    }
    dcp.load({"per_rank_state": mine}, checkpoint_id=checkpoint)
    return {key.removeprefix(f"{_rank()}."): tensor for key, tensor in mine.items()}


def _refuse_other_names(checkpoint: Path, verb: str, names: list[str], what: str) -> None:
    if names:
        first = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise CheckpointError(f"{checkpoint} is of another model: it {verb} {len(names)} tensors that {what}: {first}")


def remove_old(folder: Path, *, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints, never the one that `latest` names. Only the first rank acts."""
    if not _first():
        return
    named = (folder / LATEST).read_text().strip() if (folder / LATEST).is_file() else ""
    found = sorted((path.parent for path in folder.glob(f"*/{METADATA}")), key=lambda path: path.stat().st_mtime)
    for path in found[: max(0, len(found) - keep)]:
        if path.name != named:
            shutil.rmtree(path)


def _write_latest(folder: Path, tag: str) -> None:
    temporary = folder / f".{LATEST}.part"
    temporary.write_text(tag)
    temporary.rename(folder / LATEST)


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
