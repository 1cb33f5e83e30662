"""Weights of an engine: all of them in one process, and those of a checkpoint alone."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from plait.checkpoint import model_content
from plait.checkpoint.folder import candidates
from plait.checkpoint.load import Reader
from plait.checkpoint.places import place_of
from plait.engine.engine import Engine
from plait.parallel.data.data_parallel import free_gathered
from plait.sharded.full_weights import iterate_weights


def full_weights(engine: Engine, *, trained_only: bool = False) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer on the CPU of the first process. Collective.

    The first process needs memory for all of them, the others for one tensor at a time.

    Args:
        engine: The engine that trains the model.
        trained_only: Leave out buffers and parameters that do not require a gradient.

    Returns:
        Full tensors by name in the first process, where tied names share a tensor. Nothing in the
        others.
    """
    weights: dict[str, torch.Tensor] = {}
    for bucket in iterate_weights(engine.sharded, bucket_bytes=1, trained_only=trained_only):
        if engine.rank == 0:
            copies = {id(full): full.to("cpu", copy=True) for full in bucket.values()}
            weights |= {name: copies[id(full)] for name, full in bucket.items()}
    return weights


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
