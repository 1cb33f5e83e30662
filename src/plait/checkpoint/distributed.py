"""Training checkpoints by torch's distributed checkpoint (DCP): sharded files that load on any layout.

A checkpoint is a folder `<tag>`, written under a temporary name and renamed when every rank has finished, then named in the file
`latest`. A reader therefore never sees half a checkpoint. Tensors are keyed by parameter name; the rest (steps, data position,
configuration) is `plait.json`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from plait.errors import CheckpointError

LATEST = "latest"
FACTS = "plait.json"
# Flattened, optimizer states are keyed by parameter name, so they load on any layout, pipeline stages included.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save(
    folder: Path,
    tag: str,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    random: dict[str, torch.Tensor],
    facts: dict[str, Any],
    private: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write `folder/tag`. Collective; returns when it is complete on disk and named in `latest`.

    `random` holds this rank's generator states under keys that are unique to the rank, `private` whatever else only this rank has;
    `facts` must be JSON and the same on every rank.
    """
    target, temporary = folder / tag, folder / f".{tag}.part"
    if _first():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
    _barrier()
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=_OPTIONS), "random": random}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    if private:
        state["private"] = {f"{_rank()}.{name}": tensor for name, tensor in private.items()}
    dcp.save(state, checkpoint_id=temporary)
    if _first():
        (temporary / FACTS).write_text(json.dumps(facts, indent=1))
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
    if not (found / FACTS).is_file():
        have = sorted(path.parent.name for path in folder.glob(f"*/{FACTS}"))
        raise CheckpointError(f"{found}: no complete checkpoint there; {folder} holds {', '.join(have) or 'none'}")
    return found


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """The JSON side of a checkpoint."""
    return dict(json.loads((checkpoint / FACTS).read_text()))


def load(checkpoint: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer | None, random: dict[str, torch.Tensor]) -> bool:
    """Fill model and optimizer in place, whatever layout they were saved on. Collective.

    `random` is filled too if the checkpoint holds this rank's generators (it may come from fewer ranks); returns whether it did.
    """
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=_OPTIONS)}
    _check_shapes(state["model"], stored, checkpoint)
    has_random = all(f"random.{key}" in stored for key in random)
    if has_random:
        state["random"] = random
    fresh: dict[str, Any] = {}
    if optimizer is not None:
        optimizer.state.clear()  # so that torch makes the states of every parameter anew, to be filled
        fresh = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
        _check_state_form(fresh, stored, checkpoint)
        state["optimizer"] = {key: value for key, value in fresh.items() if f"optimizer.{key}" in stored}
    dcp.load(state, checkpoint_id=checkpoint)
    set_model_state_dict(model, state["model"], options=_OPTIONS)
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, {**fresh, **state["optimizer"]}, options=_OPTIONS)
        _forget_states(model, optimizer, {key for key in fresh if key not in state["optimizer"]})
    return has_random


def load_private(checkpoint: Path) -> dict[str, torch.Tensor]:
    """What this rank saved as `private`, by name; empty where it saved nothing. Collective."""
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    start = f"private.{_rank()}."
    if not any(key.startswith("private.") for key in stored):
        return {}
    mine = {
        key.removeprefix("private."): torch.empty(tuple(tensor.size), dtype=tensor.properties.dtype)
        for key, tensor in stored.items()
        if key.startswith(start) and isinstance(tensor, TensorStorageMetadata)
    }
    dcp.load({"private": mine}, checkpoint_id=checkpoint)
    return {key.removeprefix(f"{_rank()}."): tensor for key, tensor in mine.items()}


def _forget_states(model: nn.Module, optimizer: torch.optim.Optimizer, keys: set[str]) -> None:
    """A parameter that had no state when it was saved (no step had used it) has none now."""
    for name, parameter in model.named_parameters():
        if any(key.startswith(f"state.{name}.") for key in keys):
            optimizer.state.pop(parameter, None)


def _check_shapes(wanted: dict[str, Any], stored: dict[str, Any], checkpoint: Path) -> None:
    missing = [name for name in wanted if f"model.{name}" not in stored]
    if missing:
        raise CheckpointError(f"{checkpoint} is of another model: it lacks {len(missing)} tensors, the first is {missing[0]}")
    for name, tensor in wanted.items():
        shape = tuple(stored[f"model.{name}"].size)
        if shape != tuple(tensor.shape):
            raise CheckpointError(f"{checkpoint} is of another model: {name} has shape {shape} there and {tuple(tensor.shape)} here")


def _check_state_form(wanted: Mapping[str, Any], stored: Mapping[str, Any], checkpoint: Path) -> None:
    """States in codes are told by their names, and none of them is read as another. Parameters without stored states were never used."""
    stored_names, own_names = _states_by_parameter(stored, "optimizer.state."), _states_by_parameter(wanted, "state.")
    for parameter, names in own_names.items():
        there = stored_names.get(parameter, names)
        if there != names:
            raise CheckpointError(
                f"{checkpoint} keeps the optimizer's averages of {parameter} as {', '.join(sorted(there))}, and this run as "
                f"{', '.join(sorted(names))}; set optimizer.states to what the run was saved with"
            )


def _states_by_parameter(keys: Iterable[str], start: str) -> dict[str, set[str]]:
    """Names of states that begin with `exp_avg`, by parameter."""
    found: dict[str, set[str]] = {}
    for key in keys:
        parameter, _, name = key.removeprefix(start).rpartition(".")
        if key.startswith(start) and name.startswith("exp_avg"):
            found.setdefault(parameter, set()).add(name)
    return found


def remove_old(folder: Path, *, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints, never the one that `latest` names. Only the first rank acts."""
    if not _first():
        return
    named = (folder / LATEST).read_text().strip() if (folder / LATEST).is_file() else ""
    found = sorted((path.parent for path in folder.glob(f"*/{FACTS}")), key=lambda path: path.stat().st_mtime)
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
