"""How a model is put on the devices of this machine: a layout of several that hold it, or one that its weights are streamed to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from plait.cluster import accelerator
from plait.cluster.host_memory import free_host_bytes
from plait.cluster.layout import Layout
from plait.cluster.topology import default_processes, device_count
from plait.errors import InputError
from plait.inference.capacity import ROOM, activation_bytes, cache_bytes, free_bytes
from plait.inference.load import needs_of
from plait.inference.placement import WORKSPACE, DoesNotFit, place_model
from plait.inference.source import Source
from plait.inference.streamed import plan, tensors_of
from plait.units import format_bytes

UNKNOWN = 1 << 62
"""Bytes, where nothing says how many are free."""


@dataclass(frozen=True)
class Work:
    """What decides the layout."""

    source: Source
    model: nn.Module
    """On meta."""
    tokens: int
    """Of the longest request, its new ones included."""
    requests: int
    """At once."""


@dataclass(frozen=True)
class Deployment:
    """What the processes get."""

    why: str
    """For a person."""
    tp: int = 1
    pp: int = 1
    budget_bytes: int | None = None
    """Of the device's memory, where weights are streamed."""
    other_bytes: int = 0
    """Of it, for keys, values and activations."""
    host_bytes: int = 0
    """Of host memory that may be pinned."""


def deploy(work: Work, *, tp: int | None, pp: int | None, devices: int | None) -> Deployment:
    """On as few devices as hold the model, at most `devices` (all); streamed to one where all of them do not, and nothing was chosen (`tp`,
    `pp`, `devices`). Raises InputError, with the numbers, where it cannot be."""
    try:
        return _placed(work, tp=tp, pp=pp, devices=devices)
    except DoesNotFit:
        if tp is not None or pp is not None or devices is not None or work.source.checkpoint is not None:
            raise
        found = deploy_streamed(work)
        return replace(found, why=f"no layout of the devices here holds it: {found.why}")


def deploy_streamed(work: Work, *, gpu_budget: int | None = None, cpu_budget: int | None = None) -> Deployment:
    """On one device, within budgets in bytes; None is what is free. Raises InputError, with the numbers, where they are too small."""
    on_gpu = bool(device_count())
    if gpu_budget is not None and not on_gpu:
        raise InputError("--gpu-budget: no GPU is visible here; give --cpu-budget, to compute on the CPU within it")
    itemsize, tokens = next(work.model.parameters()).element_size(), work.tokens * work.requests
    config = getattr(work.model, "config", None)
    other = cache_bytes(config, Layout(), tokens=tokens, itemsize=itemsize)
    other += activation_bytes(config, tokens=tokens, requests=work.requests, itemsize=itemsize)
    host = 0
    if on_gpu:
        free = free_host_bytes()
        host = cpu_budget if cpu_budget is not None else UNKNOWN if free is None else int(ROOM * free)
    budget = gpu_budget if on_gpu else cpu_budget
    if budget is None:
        budget = int((1 - WORKSPACE) * _free(1))
    found = plan(work.model, tensors_of(work.source), budget_bytes=budget, other_bytes=other, host_bytes=host)
    way = f"{len(found.streamed)} layers ({format_bytes(found.streamed_bytes)}) are "
    if not found.streamed:
        way = "all of them fit"
    elif on_gpu:
        way += f"copied to it for every token, {format_bytes(found.read_bytes)} of them from files"
    else:
        way += "read for every token"
    why = (
        f"{format_bytes(found.resident_bytes)} of weights stay {'on the GPU' if on_gpu else 'in memory'}, {way}; {format_bytes(other)} for "
        "keys, values and activations"
    )
    return Deployment(why, budget_bytes=budget, other_bytes=other, host_bytes=host)


def _placed(work: Work, *, tp: int | None, pp: int | None, devices: int | None) -> Deployment:
    on_gpus = bool(device_count())
    here = devices or default_processes()
    if not on_gpus and devices is None:  # processes of one machine share its memory, so more of them hold no more
        here = (tp or 1) * (pp or 1)
    placed = place_model(
        needs_of(work.model, tokens=work.tokens * work.requests),
        machines=1,
        per_machine=here,
        device_bytes=_free(1 if on_gpus else here),
        tp=tp,
        pp=pp,
    )
    each = " on each" if placed.devices > 1 else ""
    why = f"tp {placed.tp}, pp {placed.pp}: {format_bytes(placed.weight_bytes)} of weights{each}; {placed.why}"
    return Deployment(why, placed.tp, placed.pp)


def _free(ranks_here: int) -> int:
    free = free_bytes(torch.device(accelerator.NAME if device_count() else "cpu"), ranks_here)
    return UNKNOWN if free is None else free
