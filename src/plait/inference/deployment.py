"""How a model is put on the devices of this machine: a layout of several that hold it, or one that
its weights are streamed to.

`plait generate` runs what is decided here, and `plait plan infer` prints it: there is no other
rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from plait.cluster import accelerator
from plait.cluster.host_memory import free_host_bytes
from plait.cluster.topology import default_processes, device_count
from plait.errors import InputError
from plait.inference.capacity import ROOM, activation_bytes, compute_dtype, free_bytes
from plait.inference.dry_cache import kept_of
from plait.inference.kept import Asked, Kept, cache_bytes, growing_bytes, offloaded_cache
from plait.inference.load import needs_of
from plait.inference.placement import WORKSPACE, DoesNotFit, place_model
from plait.inference.source import Source
from plait.inference.streamed import BudgetTooSmall, plan, tensors_to_stream
from plait.units import format_bytes

UNKNOWN = 1 << 62
"""Bytes, where nothing says how many are free."""


@dataclass(frozen=True)
class Work:
    """What decides the layout."""

    source: Source | None
    """None for a model without weights, of which a plan is made."""
    model: nn.Module
    """On meta."""
    tokens: int
    """Of the longest request, its new ones included."""
    requests: int
    """At once."""
    offload_cache: bool = False
    """Keys and values wait in host memory."""


@dataclass(frozen=True)
class Devices:
    """Of one machine."""

    on_gpu: bool
    count: int
    """GPUs; on the CPU, processes."""
    memory_bytes: int
    """That tensors may take on each GPU; on the CPU, in all processes together."""
    host_bytes: int
    """Of host memory that may be pinned for a GPU."""


@dataclass(frozen=True)
class Account:
    """Bytes of one device, and what is kept elsewhere for it."""

    memory: int
    """That may be used: of what is free, or the budget."""
    weights: int
    """That stay on it."""
    cache: int
    """Keys and values of all requests at once."""
    activations: int = 0
    """0 where they have the part of the memory that a placement leaves free
    (`placement.WORKSPACE`).
    """
    slots: int = 0
    """Of the places that streamed layers compute in."""
    on_host: int = 0
    """Weights in pinned host memory."""
    cache_on_host: int = 0
    """Pinned host memory for keys and values, of which `cache` has the layers that compute."""
    cache_copied: int = 0
    """Keys and values that a token brings from there, and takes back, at the end of the longest
    request.
    """
    in_files: int = 0
    """Weights that are read from files."""

    streamed_layers: int = 0

    @property
    def streamed(self) -> int:
        """Weights that are brought for every token, or for every piece of the prompts."""
        return self.on_host + self.in_files


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
    written: bool = False
    """Whether layers that are streamed are written to new files first."""
    account: Account = field(default_factory=lambda: Account(0, 0, 0))


def devices_here() -> Devices:
    """Those of this machine, as they are now."""
    on_gpu = bool(device_count())
    free = free_host_bytes()
    return Devices(
        on_gpu, default_processes(), _free(on_gpu), UNKNOWN if free is None else int(ROOM * free)
    )


def deploy(
    work: Work, *, tp: int | None, pp: int | None, devices: int | None, on: Devices | None = None
) -> Deployment:
    """On as few devices as hold the model, at most `devices` (all); streamed to one where all of
    them do not, and nothing was chosen (`tp`, `pp`, `devices`). `on`: other devices than this
    machine's. Raises InputError, with the numbers, where it cannot be.
    """
    on = on or devices_here()
    _check_offloaded(work, on)
    try:
        return _placed(work, on, tp=tp, pp=pp, devices=devices)
    except DoesNotFit:
        if tp is not None or pp is not None or devices is not None:
            raise
        found = deploy_streamed(work, on=on)
        return replace(found, why=f"no layout of the devices here holds it: {found.why}")


def deploy_streamed(
    work: Work,
    *,
    gpu_budget: int | None = None,
    cpu_budget: int | None = None,
    on: Devices | None = None,
) -> Deployment:
    """On one device, within budgets in bytes; None is what is free. Raises InputError, with the
    numbers, where they are too small.
    """
    on = on or devices_here()
    _check_offloaded(work, on)
    if gpu_budget is not None and not on.on_gpu:
        raise InputError(
            "--gpu-budget: no GPU is visible here; give --cpu-budget, to compute on the CPU"
            " within it"
        )
    itemsize = compute_dtype(work.model).itemsize
    tokens = work.tokens * work.requests
    config = getattr(work.model, "config", None)
    keeps = kept_of(work.model)
    asked = Asked(work.requests, work.tokens, itemsize)
    cache = cache_bytes(keeps, asked)
    activations = activation_bytes(config, tokens=tokens, requests=work.requests, itemsize=itemsize)
    activations += growing_bytes(keeps, asked)
    host = 0
    if on.on_gpu:
        host = cpu_budget if cpu_budget is not None else on.host_bytes
    kept = copied = 0
    if work.offload_cache:
        waiting = offloaded_cache(keeps, asked)
        cache = waiting.device
        kept = waiting.pinned
        copied = waiting.copied
        host = _left(host, kept)
    budget = gpu_budget if on.on_gpu else cpu_budget
    if budget is None:
        budget = int((1 - WORKSPACE) * on.memory_bytes)
    stored, written = tensors_to_stream(work.source, work.model)
    found = plan(
        work.model, stored, budget_bytes=budget, other_bytes=cache + activations, host_bytes=host
    )
    way = f"{len(found.streamed)} layers ({format_bytes(found.streamed_bytes)}) are "
    if not found.streamed:
        way = "all of them fit"
    elif on.on_gpu:
        way += f"copied to it for every token, {format_bytes(found.read_bytes)} of them from files"
    else:
        way += "read for every token"
    if written and found.streamed:
        way += f" (written to new files first: {written})"
    why = (
        f"{format_bytes(found.resident_bytes)} of weights stay"
        f" {'on the GPU' if on.on_gpu else 'in memory'}, {way}; {format_bytes(cache + activations)}"
        f" for keys, values and activations{_on_host(kept)}{_guessed(keeps)}"
    )
    account = Account(
        memory=budget,
        weights=found.resident_bytes,
        cache=cache,
        activations=activations,
        slots=found.slot_bytes,
        on_host=found.streamed_bytes - found.read_bytes if on.on_gpu else 0,
        cache_on_host=kept,
        cache_copied=copied,
        in_files=found.read_bytes,
        streamed_layers=len(found.streamed),
    )
    return Deployment(
        why,
        budget_bytes=budget,
        other_bytes=cache + activations,
        host_bytes=host,
        written=bool(written and found.streamed),
        account=account,
    )


def deploy_in_budget(
    work: Work, *, gpu_budget: int | None = None, cpu_budget: int | None = None
) -> tuple[Deployment, int]:
    """Choose how many requests are answered at once within a budget, at most `work.requests`.

    Args:
        work: What is to be answered.
        gpu_budget: See `deploy_streamed`.
        cpu_budget: See `deploy_streamed`.

    Returns:
        The deployment, and the requests at once that it is for.

    Raises:
        InputError: The budget is too small for a single request.
    """
    requests = work.requests
    while True:
        try:
            return (
                deploy_streamed(
                    replace(work, requests=requests), gpu_budget=gpu_budget, cpu_budget=cpu_budget
                ),
                requests,
            )
        except BudgetTooSmall:
            if requests == 1:
                raise
            requests //= 2


def _placed(
    work: Work, on: Devices, *, tp: int | None, pp: int | None, devices: int | None
) -> Deployment:
    here = devices or on.count
    # processes of one machine share its memory, so more of them hold no more
    if not on.on_gpu and devices is None:
        here = (tp or 1) * (pp or 1)
    memory = on.memory_bytes if on.on_gpu else on.memory_bytes // here
    needs = needs_of(work.model, requests=work.requests, tokens=work.tokens)
    kept = 0
    copied = 0
    asked = Asked(work.requests, work.tokens, compute_dtype(work.model).itemsize)
    keeps = kept_of(work.model)
    if work.offload_cache:
        needs = replace(needs, cache=lambda tp, pp: offloaded_cache(keeps, asked, tp=tp).device)
    placed = place_model(needs, machines=1, per_machine=here, device_bytes=memory, tp=tp, pp=pp)
    if placed.pp > 1 and work.offload_cache:
        raise InputError(
            f"--offload-cache: the model takes {placed.pp} pipeline stages, which cannot bring next"
            " layers; leave it out"
        )
    if work.offload_cache:
        waiting = offloaded_cache(keeps, asked, tp=placed.tp)
        kept = placed.tp * waiting.pinned
        copied = waiting.copied
        _left(on.host_bytes, kept)
    each = " on each" if placed.devices > 1 else ""
    why = (
        f"tp {placed.tp}, pp {placed.pp}: {format_bytes(placed.weight_bytes)} of weights{each};"
        f" {placed.why}"
    )
    why += f"{_on_host(kept)}{_guessed(keeps)}"
    account = Account(
        int(memory * (1 - WORKSPACE)),
        placed.weight_bytes,
        placed.cache_bytes,
        cache_on_host=kept,
        cache_copied=copied,
    )
    return Deployment(why, placed.tp, placed.pp, account=account)


def _check_offloaded(work: Work, on: Devices) -> None:
    if work.offload_cache and not on.on_gpu:
        raise InputError(
            "--offload-cache: on the CPU keys and values are in host memory already; leave it out"
        )


def _left(host_bytes: int, kept: int) -> int:
    """Of host memory, beside keys and values. Raises InputError where they do not fit."""
    if kept > host_bytes:
        raise InputError(
            f"--offload-cache: keys and values take {format_bytes(kept)} of pinned host memory, and"
            f" {format_bytes(host_bytes)} may be used; ask for fewer tokens or requests at once, or"
            " give a larger --cpu-budget"
        )
    return host_bytes - kept


def _on_host(kept: int) -> str:
    return f"; {format_bytes(kept)} of keys and values in host memory" if kept else ""


def _guessed(keeps: Kept) -> str:
    if not keeps.guessed:
        return ""
    counted = "by the heads of the configuration, and may take more"
    if not keeps.layers:
        counted = "not at all, as the configuration says no heads"
    return (
        f"; keys and values are counted {counted}: the model could not be run without weights"
        f" ({keeps.guessed})"
    )


def _free(on_gpu: bool) -> int:
    free = free_bytes(torch.device(accelerator.NAME if on_gpu else "cpu"), 1)
    return UNKNOWN if free is None else free
