"""Deployment of a model on the devices of one machine: choice of a placement, and loading.

A model is either placed on one or several devices, or streamed to one device. `plait generate` runs
the deployment that is chosen here, and `plait plan infer` prints it with the time per token that
memory bandwidth permits.

Note [Choice of a placement]
    If the model fits on one device, a single device is used. Otherwise tensor parallelism is used,
    with the smallest degree that fits: all devices then work on each token. Pipeline stages are
    used only if no degree fits: on as few devices as possible, with the largest possible degree of
    tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from plait.cluster import accelerator
from plait.cluster.host_memory import free_host_bytes
from plait.cluster.topology import default_processes, device_count, place
from plait.config.resolving.resolve import load, resolve
from plait.errors import InputError
from plait.inference.capacity import (
    USABLE_SHARE,
    CacheDemand,
    CacheLayout,
    activation_bytes,
    cache_bytes,
    cache_layout_of,
    compute_dtype,
    free_bytes,
    growing_bytes,
    offloaded_cache,
)
from plait.inference.source import Source
from plait.inference.streamed_model import (
    BudgetTooSmall,
    StreamingPlan,
    on_huge_pages,
    plan_streaming,
    tensors_to_stream,
)
from plait.model.facts import largest_of_layers, sizes_of_layers
from plait.parallel.micro_batches import default_forward
from plait.planner.hardware import DeviceSpec, device, only
from plait.sharded.assemble import checked_model, destroying_new_group, shard
from plait.sharded.model import ShardedModel
from plait.sizes import format_bytes

WORKSPACE = 0.08
"""Share of a device's memory that weights and cache leave free.

Activations and the allocator need it.
"""
UNKNOWN = 1 << 62
"""Value that stands for an unknown number of free bytes."""


@dataclass(frozen=True)
class InferenceWork:
    """Model and requests that a deployment is chosen for."""

    source: Source | None
    """Source of the weights; None for a model without weights, for which a plan is made."""
    model: nn.Module
    """The model, on the meta device."""
    tokens: int
    """Length of the longest request, new tokens included."""
    requests: int
    """Number of requests at the same time."""
    offload_cache: bool = False
    """True if keys and values are kept in host memory."""

    @property
    def demand(self) -> CacheDemand:
        """Requests that the KV cache must hold."""
        return CacheDemand(self.requests, self.tokens, compute_dtype(self.model).itemsize)


@dataclass(frozen=True)
class Devices:
    """Kind, number and free memory of the devices of one machine."""

    on_gpu: bool
    count: int
    """Number of GPUs, or of processes on the CPU."""
    memory_bytes: int
    """Memory for tensors of each GPU, or of all processes on the CPU together."""
    host_bytes: int
    """Host memory that may be pinned for GPUs."""


@dataclass(frozen=True)
class DeploymentBytes:
    """Bytes that inference uses on one device, and in host memory and files for that device."""

    memory: int
    """Memory that may be used: a share of the free memory, or the budget."""
    weights: int
    """Weights that stay on the device."""
    cache: int
    """Keys and values of all requests."""
    activations: int = 0
    """Activations; 0 if they use the share that a placement leaves free (`WORKSPACE`)."""
    slots: int = 0
    """Memory in which streamed layers compute."""
    on_host: int = 0
    """Weights in pinned host memory."""
    cache_on_host: int = 0
    """Pinned host memory for keys and values. `cache` then counts only layers on the device."""
    cache_copied: int = 0
    """Keys and values that are copied from the host and back for every token.

    They grow with every token. The value is that at the end of the longest request.
    """
    in_files: int = 0
    """Weights that are read from files."""

    streamed_layers: int = 0

    @property
    def streamed(self) -> int:
        """Bytes of weights that every forward streams, whether of a prefill or of one token."""
        return self.on_host + self.in_files


@dataclass(frozen=True)
class Deployment:
    """Chosen deployment: a layout of processes, or memory budgets for streaming."""

    why: str
    """Explanation for the user."""
    tp: int = 1
    pp: int = 1
    budget_bytes: int | None = None
    """Budget of the device's memory; None if no weights are streamed."""
    other_bytes: int = 0
    """Part of the budget for the KV cache and activations."""
    host_bytes: int = 0
    """Host memory that may be pinned for weights."""
    written: bool = False
    """True if streamed layers are written to new files first."""
    estimate: DeploymentBytes = field(default_factory=lambda: DeploymentBytes(0, 0, 0))


def local_devices() -> Devices:
    """Return the devices of this machine, with the memory that is currently free."""
    on_gpu = bool(device_count())
    free = free_bytes(torch.device(accelerator.NAME if on_gpu else "cpu"), 1)
    free_on_host = free_host_bytes()
    return Devices(
        on_gpu,
        default_processes(),
        UNKNOWN if free is None else free,
        UNKNOWN if free_on_host is None else int(USABLE_SHARE * free_on_host),
    )


def deploy(
    work: InferenceWork,
    *,
    tp: int | None,
    pp: int | None,
    devices: int | None,
    machine: Devices | None = None,
) -> Deployment:
    """Choose the deployment on the fewest devices that hold the model.

    If all devices together do not hold the model, and the user chose none of `tp`, `pp` and
    `devices`, the weights are streamed to one device.

    Args:
        work: Model and requests.
        tp: Degree of tensor parallelism, if the user chose it.
        pp: Number of pipeline stages, if the user chose it.
        devices: Largest number of devices, if the user chose it.
        machine: Devices to use. None means those of this machine.

    Raises:
        InputError: The model does not fit, or the choices are not possible.
    """
    machine = machine or local_devices()
    _check_offloaded_cache(work, machine)
    try:
        return _deploy_placed(work, machine, tp=tp, pp=pp, devices=devices)
    except DoesNotFit:
        if tp is not None or pp is not None or devices is not None:
            raise
        streamed = deploy_streamed(work, machine=machine)
        return replace(streamed, why=f"no layout of these devices holds it: {streamed.why}")


def deploy_streamed(
    work: InferenceWork,
    *,
    gpu_budget: int | None = None,
    cpu_budget: int | None = None,
    machine: Devices | None = None,
) -> Deployment:
    """Deploy a model on one device, to which its weights are streamed as needed.

    Args:
        work: Model and requests.
        gpu_budget: Memory of the GPU in bytes. None means the free memory.
        cpu_budget: Host memory in bytes. None means the free memory.
        machine: Devices to use. None means those of this machine.

    Raises:
        InputError: A budget is too small.
    """
    machine = machine or local_devices()
    _check_offloaded_cache(work, machine)
    if gpu_budget is not None and not machine.on_gpu:
        raise InputError(
            "--gpu-budget: this machine has no visible GPU; use --cpu-budget instead, to compute on"
            " the CPU"
        )
    budget = gpu_budget if machine.on_gpu else cpu_budget
    if budget is None:
        # The allocator needs the rest, as in a placement.
        budget = int((1 - WORKSPACE) * machine.memory_bytes)
    host = 0
    if machine.on_gpu:
        host = cpu_budget if cpu_budget is not None else machine.host_bytes

    layout = cache_layout_of(work.model)
    demand = work.demand
    cache = cache_bytes(layout, demand)
    activations = activation_bytes(
        getattr(work.model, "config", None),
        tokens=work.tokens * work.requests,
        requests=work.requests,
        itemsize=demand.itemsize,
    )
    activations += growing_bytes(layout, demand)
    cache_on_host = 0
    cache_copied = 0
    if work.offload_cache:
        offloaded = offloaded_cache(layout, demand)
        cache = offloaded.device
        cache_on_host = offloaded.pinned
        cache_copied = offloaded.copied
        host = _remaining_host_bytes(host, cache_on_host)

    stored, written = tensors_to_stream(work.source, work.model)
    planned = plan_streaming(
        work.model, stored, budget_bytes=budget, other_bytes=cache + activations, host_bytes=host
    )
    location = "on the GPU" if machine.on_gpu else "in memory"
    why = (
        f"{format_bytes(planned.resident_bytes)} of weights stay {location},"
        f" {_streaming_text(planned, written, on_gpu=machine.on_gpu)};"
        f" {format_bytes(cache + activations)} for the KV cache and activations"
        f"{_host_text(cache_on_host)}{_guess_text(layout)}"
    )
    estimate = DeploymentBytes(
        memory=budget,
        weights=planned.resident_bytes,
        cache=cache,
        activations=activations,
        slots=planned.slot_bytes,
        on_host=planned.streamed_bytes - planned.read_bytes if machine.on_gpu else 0,
        cache_on_host=cache_on_host,
        cache_copied=cache_copied,
        in_files=planned.read_bytes,
        streamed_layers=len(planned.streamed),
    )
    return Deployment(
        why,
        budget_bytes=budget,
        other_bytes=cache + activations,
        host_bytes=host,
        written=bool(written and planned.streamed),
        estimate=estimate,
    )


def deploy_in_budget(
    work: InferenceWork, *, gpu_budget: int | None = None, cpu_budget: int | None = None
) -> tuple[Deployment, int]:
    """Choose how many requests, up to `work.requests`, are answered at once within a budget.

    Args:
        work: Model and requests.
        gpu_budget: See `deploy_streamed`.
        cpu_budget: See `deploy_streamed`.

    Returns:
        (deployment, number of requests that it answers at once).

    Raises:
        InputError: The budget is too small for a single request.
    """
    # An attempt only computes sizes; nothing is loaded.
    requests = work.requests
    while True:
        try:
            deployment = deploy_streamed(
                replace(work, requests=requests), gpu_budget=gpu_budget, cpu_budget=cpu_budget
            )
            return deployment, requests
        except BudgetTooSmall:
            if requests == 1:
                raise
            requests //= 2


def _deploy_placed(
    work: InferenceWork, machine: Devices, *, tp: int | None, pp: int | None, devices: int | None
) -> Deployment:
    """Deploy a model on devices that hold all of its weights."""
    count = devices or machine.count
    # Processes of one machine share its memory, so more of them hold no more.
    if not machine.on_gpu and devices is None:
        count = (tp or 1) * (pp or 1)
    memory = machine.memory_bytes if machine.on_gpu else machine.memory_bytes // count

    layout = cache_layout_of(work.model)
    placed = place_model(needs_of(work), devices=count, device_bytes=memory, tp=tp, pp=pp)

    cache_on_host = 0
    cache_copied = 0
    if work.offload_cache:
        if placed.pp > 1:
            raise InputError(
                f"--offload-cache: the model needs {placed.pp} pipeline stages, which cannot"
                " prefetch the layers of an offloaded cache; leave it out"
            )
        offloaded = offloaded_cache(layout, work.demand, tp=placed.tp)
        cache_on_host = placed.tp * offloaded.pinned
        cache_copied = offloaded.copied
        _remaining_host_bytes(machine.host_bytes, cache_on_host)

    each = " on each" if placed.devices > 1 else ""
    why = (
        f"tp {placed.tp}, pp {placed.pp}: {format_bytes(placed.weight_bytes)} of weights{each};"
        f" {placed.why}{_host_text(cache_on_host)}{_guess_text(layout)}"
    )
    estimate = DeploymentBytes(
        int(memory * (1 - WORKSPACE)),
        placed.weight_bytes,
        placed.cache_bytes,
        cache_on_host=cache_on_host,
        cache_copied=cache_copied,
    )
    return Deployment(why, placed.tp, placed.pp, estimate=estimate)


def _check_offloaded_cache(work: InferenceWork, machine: Devices) -> None:
    if work.offload_cache and not machine.on_gpu:
        raise InputError(
            "--offload-cache: on the CPU the KV cache is in host memory already; leave it out"
        )


def _remaining_host_bytes(host_bytes: int, cache: int) -> int:
    """Return the host memory that an offloaded KV cache leaves free.

    Raises:
        InputError: The KV cache does not fit.
    """
    if cache > host_bytes:
        raise InputError(
            f"--offload-cache: the KV cache takes {format_bytes(cache)} of pinned host memory,"
            f" but {format_bytes(host_bytes)} may be used; ask for fewer tokens or requests at"
            " once, or pass a larger --cpu-budget"
        )
    return host_bytes - cache


def _streaming_text(planned: StreamingPlan, written: str, *, on_gpu: bool) -> str:
    if not planned.streamed:
        return "all of them fit"
    text = f"{len(planned.streamed)} layers ({format_bytes(planned.streamed_bytes)}) are "
    if on_gpu:
        text += f"copied to it for every token, {format_bytes(planned.read_bytes)} of them from"
        text += " files"
    else:
        text += "read for every token"
    if written:
        text += f" (written to new files first: {written})"
    return text


def _host_text(cache: int) -> str:
    return f"; {format_bytes(cache)} of KV cache in host memory" if cache else ""


def _guess_text(layout: CacheLayout) -> str:
    if not layout.guessed:
        return ""
    counted = "is computed from the heads in the configuration, and may take more"
    if not layout.layers:
        counted = "is not counted, because the configuration defines no heads"
    return (
        f"; the KV cache {counted}: the model could not be run without weights ({layout.guessed})"
    )


@dataclass(frozen=True)
class BandwidthBound:
    """Lower bound of the time per token. A real decoder is slower.

    Attributes:
        token_seconds: Time per token of the slowest memory tier.
        limit: Name of that tier.
    """

    token_seconds: float
    limit: str


def bandwidth_bound(estimate: DeploymentBytes, gpu: DeviceSpec) -> BandwidthBound:
    """Return the time per token of the slowest memory tier.

    The time of a tier is the bytes read per token, divided by the bandwidth.

    Every token reads all weights, and the keys and values of all requests at their full length.
    Files are left out, because no datasheet says how fast they are read.

    Args:
        estimate: Bytes per tier of one device.
        gpu: The device, from the planner's catalogue.
    """
    on_device = estimate.weights + estimate.streamed + estimate.cache
    from_host = estimate.on_host + estimate.cache_copied
    seconds = {
        "the GPU's memory": on_device / float(only(gpu.memory_bandwidth)),
        "the link from host memory": from_host / float(only(gpu.host_bandwidth)),
    }
    limit = max(seconds, key=lambda tier: seconds[tier])
    return BandwidthBound(seconds[limit], limit)


def devices_of(gpu: DeviceSpec, count: int | None) -> Devices:
    """Return a machine with idle devices of one type.

    Args:
        gpu: The kind of device, from the planner's catalogue.
        count: Number of devices. None means the usual number of devices per machine.
    """
    count = count or int(only(gpu.devices_per_node))
    return Devices(
        on_gpu=not bool(gpu.on_cpu),
        count=count,
        memory_bytes=int(only(gpu.memory_bytes)),
        host_bytes=int(USABLE_SHARE * only(gpu.host_memory_bytes) * count),
    )


def catalogued_gpu() -> DeviceSpec | None:
    """Return this machine's GPU from the planner's catalogue, or None if it is not listed."""
    try:
        return device(accelerator.model_name())
    except InputError:
        return None


class DoesNotFit(InputError):
    """Raised if the model does not fit on the devices in any placement."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Device memory that a model needs for some requests."""

    weight_bytes: int
    split_bytes: int
    """Part of the weights that tensor parallelism splits. Every rank has the rest."""
    cache: Callable[[int, int], int]
    """Function from degrees (tp, pp) to the bytes of keys and values of all requests.

    The bytes are those on the device with the largest part.
    """
    heads: int
    """Number of query heads."""
    key_value_heads: int
    layers: int


@dataclass(frozen=True)
class Placement:
    """Layout of a model, and the bytes on each device."""

    tp: int
    pp: int
    weight_bytes: int
    cache_bytes: int
    why: str
    """Explanation for the user."""

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.tp * self.pp


def place_model(
    needs: MemoryNeeds,
    *,
    devices: int,
    device_bytes: int,
    tp: int | None = None,
    pp: int | None = None,
) -> Placement:
    """Return the placement on the fewest devices. See Note [Choice of a placement].

    Args:
        needs: Memory that the model needs.
        devices: Number of devices of the machine.
        device_bytes: Memory of each device.
        tp: Degree of tensor parallelism, if the user chose it.
        pp: Number of pipeline stages, if the user chose it.

    Raises:
        DoesNotFit: No placement holds the model. The error reports the memory of the placement that
            comes closest.
        InputError: A choice of the user is not possible.
    """
    _check_choices(needs, devices, tp=tp, pp=pp)
    available = int(device_bytes * (1 - WORKSPACE))
    closest: Placement | None = None
    for degree, stages in _candidates(needs, devices):
        if (tp is not None and degree != tp) or (pp is not None and stages != pp):
            continue
        replicated = needs.weight_bytes - needs.split_bytes
        # Stages are assumed to have equal parts.
        weights = -(-(needs.split_bytes // degree + replicated) // stages)
        cache = needs.cache(degree, stages)
        why = "as requested"
        if tp is None and pp is None:
            why = _explanation(degree, stages)
        placement = Placement(degree, stages, weights, cache, why)
        if weights + cache <= available:
            return placement
        if closest is None or weights + cache < closest.weight_bytes + closest.cache_bytes:
            closest = placement

    assert closest is not None
    raise DoesNotFit(
        f"the model does not fit: at tp = {closest.tp}, pp = {closest.pp} a device would hold"
        f" {format_bytes(closest.weight_bytes)} of weights and {format_bytes(closest.cache_bytes)}"
        f" of keys and values, but {format_bytes(available)} of its {format_bytes(device_bytes)}"
        f" may be used (1 machine x {devices} devices); use more devices, fewer tokens or"
        " requests at once, or a dtype with fewer bytes"
    )


def _candidates(needs: MemoryNeeds, devices: int) -> Iterator[tuple[int, int]]:
    """Yield the degrees (tp, pp) in the order in which they are tried.

    See Note [Choice of a placement].
    """
    degrees = _tensor_degrees(needs, devices)
    for degree in degrees:
        yield degree, 1

    pairs = product(degrees, range(1, min(needs.layers, devices) + 1))
    others = [pair for pair in pairs if pair[0] * pair[1] <= devices]
    # Fewest devices first, and of these the largest degree of tensor parallelism.
    yield from sorted(others, key=lambda pair: (pair[0] * pair[1], -pair[0]))


def _tensor_degrees(needs: MemoryNeeds, devices: int) -> list[int]:
    """Return the degrees of tensor parallelism that a model allows on a number of devices."""
    return [
        degree
        for degree in range(1, devices + 1)
        if needs.heads % degree == 0 and _can_split(degree, needs.key_value_heads)
    ]


def _can_split(degree: int, key_value_heads: int) -> bool:
    """Return True if every rank has complete key-value heads, or several ranks share one."""
    return key_value_heads % degree == 0 or degree % key_value_heads == 0


def _check_choices(needs: MemoryNeeds, devices: int, *, tp: int | None, pp: int | None) -> None:
    degrees = ", ".join(map(str, _tensor_degrees(needs, devices)))
    if tp is not None and (tp < 1 or needs.heads % tp or not _can_split(tp, needs.key_value_heads)):
        raise InputError(
            f"--tp {tp}: must divide the model's {needs.heads} attention heads, and divide or be a"
            f" multiple of its {needs.key_value_heads} key and value heads; use one of {degrees}"
        )
    if tp is not None and tp > devices:
        raise InputError(
            f"--tp {tp}: a machine has {devices} devices, and tensor parallelism stays inside"
            f" one; use one of {degrees}"
        )
    if pp is not None and not 1 <= pp <= needs.layers:
        raise InputError(
            f"--pp {pp}: must be between 1 and the model's {needs.layers} layers; use fewer"
        )
    chosen = (tp or 1) * (pp or 1)
    if chosen > devices:
        raise InputError(
            f"--tp {tp or 1} x --pp {pp or 1}: {chosen} devices, but there are {devices}; use fewer"
        )


def _explanation(tp: int, pp: int) -> str:
    if tp == pp == 1:
        return "it fits on one device"
    if pp == 1:
        return (
            f"the fewest devices of one machine that hold it are {tp}, and tensor parallelism lets"
            " all of them work on each token"
        )
    return f"{tp} devices of a machine do not hold it, but {pp} pipeline stages of {tp} devices do"


def needs_of(work: InferenceWork) -> MemoryNeeds:
    """Return the device memory that a Transformers model needs for some requests.

    Raises:
        InputError: The configuration does not define the numbers of heads and layers.
    """
    model = work.model
    full: Any = model.config
    config = full.get_text_config(decoder=True)
    heads = largest_of_layers(config, "num_attention_heads")
    layers = getattr(config, "num_hidden_layers", None)
    if not heads or not layers:
        raise InputError(
            f"{type(model).__name__}: its configuration does not define num_attention_heads and"
            " num_hidden_layers, so no layout can be chosen; add them to its config.json"
        )
    key_value_heads = min(sizes_of_layers(config, "num_key_value_heads"), default=heads)

    weight_bytes = 0
    split_bytes = 0
    for parameter in model.parameters():
        size = parameter.numel() * parameter.element_size()
        weight_bytes += size
        # Matrices are split. Norms and biases are small, and counted as replicated.
        if parameter.ndim > 1:
            split_bytes += size

    layout = cache_layout_of(model)
    demand = work.demand

    def cache_on_device(tp: int, pp: int) -> int:
        if work.offload_cache:
            # Host memory has the rest of the cache.
            return offloaded_cache(layout, demand, tp=tp).device
        return cache_bytes(layout, demand, tp=tp, pp=pp)

    return MemoryNeeds(weight_bytes, split_bytes, cache_on_device, heads, key_value_heads, layers)


@destroying_new_group()
def load_model(
    source: Source, *, tp: int = 1, pp: int = 1, dtype: torch.dtype | None = None
) -> ShardedModel:
    """Load a model for `generate`. Collective.

    Each process reads its own slices of the weights.

    Args:
        source: Source of the model.
        tp: Degree of tensor parallelism.
        pp: Number of pipeline stages.
        dtype: Dtype of the model. None means the dtype that it was saved in.

    Raises:
        InputError: The number of processes is not tp x pp, or the model cannot be loaded.
    """
    model = source.model(dtype)
    world_size = place().world_size
    if world_size != tp * pp:
        raise InputError(
            f"tp = {tp} x pp = {pp} are {tp * pp} processes, but {world_size} were started; start"
            f" {tp * pp}"
        )
    parallel: dict[str, Any] = {"tp": tp, "pp": pp}
    if tp > 1:
        parallel["sequence_parallel"] = False
    settings = load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 0},
            "parallel": parallel,
        }
    )
    hidden_size = getattr(model.config, "hidden_size", None)
    resolved = resolve(settings, world_size=world_size, hidden_size=hidden_size)
    checked = checked_model(model, resolved)
    mesh, parts, _ = shard(checked, weights=on_huge_pages(source.filler()))
    model.requires_grad_(False)
    return ShardedModel(parts, mesh, resolved, forward=default_forward, variable="plait generate")
