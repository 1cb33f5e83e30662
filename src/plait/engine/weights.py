"""All weights of a sharded model in one process, tensor after tensor, and from a folder or a checkpoint into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from plait.checkpoint import model_content
from plait.checkpoint.folder import candidates
from plait.checkpoint.load import Reader
from plait.checkpoint.places import place_of
from plait.engine.engine import Engine
from plait.parallel.data.data_parallel import free_gathered


def full_weights(engine: Engine, *, trained: bool = False) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer by name, on the CPU, in the first process; nothing in the others. Tied names share a tensor.
    `trained`: only those that are. Collective. The first process needs memory for all of it, the others for one tensor."""
    free_gathered(engine.model)
    mesh = engine.mesh
    group = mesh.group("pp")
    if trained:  # others may have a state_dict of their own kind, such as quantised weights, which a stage does not have
        held = {name: tensor for name, tensor in engine.model.named_parameters(remove_duplicate=False) if tensor.requires_grad}
    else:
        held = engine.model.state_dict(keep_vars=True)
    own = {name: tensor for name, tensor in held.items() if isinstance(tensor, torch.Tensor) and not tensor.is_meta}
    facts = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()}
    stages: list[dict[str, Any]] = [facts]
    if group is not None:
        stages = [{} for _ in range(group.size())]
        dist.all_gather_object(stages, facts, group=group)
    found: dict[str, torch.Tensor] = {}
    shared: dict[int, torch.Tensor] = {}
    for stage, here in enumerate(stages):
        for name, (shape, dtype) in here.items():
            if any(name in earlier for earlier in stages[:stage]):
                continue
            mine = own[name] if group is None or group.rank() == stage else None
            if mine is not None:
                full = mine.full_tensor() if isinstance(mine, DTensor) else mine
                full = full.detach().contiguous()
            else:
                full = torch.empty(shape, dtype=dtype, device=engine.device)
            if group is not None:
                dist.broadcast(full, group=group, group_src=stage)
            if engine.rank == 0:
                kept = shared.get(id(mine)) if mine is not None else None
                found[name] = kept if kept is not None else full.to("cpu", copy=True)
                if mine is not None:
                    shared[id(mine)] = found[name]
    return found


def load_weights_of(engine: Engine, folder: str | Path, *, tag: str | None) -> Reader | None:
    """The weights of a checkpoint of the engine's, and nothing else of it; with `tag` None of the newest, None where there is none.
    Collective. Raises CheckpointError."""
    free_gathered(engine.model)
    found = candidates(place_of(folder), tag)
    if not found:
        return None
    reader = Reader(found[0])
    reader.verify("full", rank=engine.rank, world=engine.world_size)
    tensors, _ = model_content.content(engine.model)
    reader.fill(tensors)
    model_content.put_values(engine.model, reader.values)
    return reader


def uncut(engine: Engine) -> nn.Module:
    """The model, or where a pipeline has cut it a copy without weights that has all of its modules."""
    pipeline = engine.sharded.pipeline
    check = pipeline.runtime.check if pipeline is not None else None
    return check.skeleton.model if check is not None else engine.model
