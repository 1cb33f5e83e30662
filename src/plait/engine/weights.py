"""Gathering of an engine's full weights, and loading of a checkpoint's weights alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from plait._torch.modules import is_persistent
from plait.checkpoint import states
from plait.checkpoint.load import Reader, compare_model
from plait.checkpoint.places import place_of
from plait.comm.failures import naming, run_on_all_ranks
from plait.engine.engine import Engine
from plait.engine.state import open_checkpoint, trained_parameters
from plait.errors import InputError, warn
from plait.parallel.techniques.data_parallel import free_gathered
from plait.sharded.full_weights import gathered, local_tensors

T = TypeVar("T")


def full_weights(
    engine: Engine, *, model: nn.Module | None = None, adapters: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer on the CPU of the first process. Collective.

    The first process needs memory for all of them. Every other process needs memory for one tensor
    at a time.

    Args:
        engine: The engine that trains the model.
        model: Model to read instead of the engine's model, such as one into which adapters were
            merged. It must be on the same ranks.
        adapters: Names of the adapters on the model. If there are any, the result has only their
            parameters and buffers, and other parameters that are or were trained.

    Returns:
        Full tensors by name in the first process. Tied names share one tensor. The result is empty
        in the other processes.

    Raises:
        InputError: There is no tensor to return.
    """
    source = engine.model if model is None else model
    weights: dict[str, torch.Tensor] = {}
    count = 0

    def is_adapters(name: str) -> bool:
        return not set(adapters).isdisjoint(name.split("."))

    def tensors() -> dict[str, torch.Tensor]:
        if not adapters:
            return local_tensors(source)
        # Not only the trainable ones: PEFT freezes every adapter but the active one.
        stored: dict[str, torch.Tensor] = {}
        for name, parameter in source.named_parameters(remove_duplicate=False):
            is_trained = parameter.requires_grad or not states.is_left_out(source, name)
            if is_adapters(name) or is_trained:
                stored[name] = parameter
        # Adapters have buffers too, such as the projections that the layers of VeRA share. They are
        # not read from the state dict: layers of quantisation libraries extend it with facts of
        # their weight, which fails for the layers of other pipeline stages.
        for name, buffer in source.named_buffers(remove_duplicate=False):
            owner, _, leaf = name.rpartition(".")
            if is_adapters(name) and is_persistent(source.get_submodule(owner), leaf):
                stored[name] = buffer
        return stored

    with naming(
        "the gathering of full weights, which every rank must call (save_model on all of them)"
    ):
        # Buckets of one tensor each, which is all that the other processes need memory for.
        for bucket in gathered(engine.sharded, tensors, bucket_bytes=1):
            count += len(bucket)
            if engine.rank == 0:
                # One copy of a tensor that has several names.
                copies = {id(full): full.to("cpu", copy=True) for full in bucket.values()}
                weights |= {name: copies[id(full)] for name, full in bucket.items()}
    if not count:
        raise InputError(
            f"{type(source).__name__} has no weights to save: neither a parameter nor a buffer"
            + (f", and none of the adapters {', '.join(adapters)}" if adapters else "")
            + "; save the model that was trained"
        )
    return weights


def load_weights_of(engine: Engine, folder: str | Path, *, tag: str | None) -> Reader | None:
    """Load the weights of a checkpoint, and nothing else of it. Collective.

    Args:
        engine: The engine.
        folder: Folder of checkpoints.
        tag: Name of the checkpoint. None: the newest one that is not damaged.

    Returns:
        The reader of the checkpoint, or None if there is none.

    Raises:
        CheckpointError: The checkpoint is damaged, or of another model.
    """
    free_gathered(engine.model)
    opened = open_checkpoint(engine, place_of(folder), tag, "full")
    if opened is None:
        return None
    reader, notes = opened
    trained = trained_parameters(engine.optimizer)
    activity = f"checkpoint {reader.path}"

    def agreed(work: Callable[[], T]) -> T:
        return run_on_all_ranks(work, device=engine.device, activity=activity)[0]

    tensors, _ = agreed(lambda: states.model_content(engine.model, trained=trained))
    # Nothing is written before the comparison, so a refused model keeps its weights.
    shapes = states.model_shapes(tensors, engine.mesh.group("pp"))
    agreed(lambda: compare_model(reader, shapes))
    agreed(lambda: reader.fill(tensors))
    states.put_values(engine.model, reader.values)
    if engine.rank == 0:
        for note in notes:
            warn(f"{reader.path.name}: {note}")
    return reader


def unsplit_model(engine: Engine) -> nn.Module:
    """Return a model with all modules, even if a pipeline has split the engine's model.

    With a pipeline it is a copy without weights.
    """
    pipeline = engine.sharded.pipeline
    check = pipeline.runtime.check if pipeline is not None else None
    return check.skeleton.model if check is not None else engine.model
