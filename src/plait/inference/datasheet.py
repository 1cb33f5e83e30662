"""How long a device of the planner's catalogue takes for a forward: its datasheet, and what the planner's constants make of it.

No generation was ever measured against these numbers; `plait plan infer` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from plait.errors import InputError
from plait.inference.capacity import ROOM, compute_dtype
from plait.inference.deployment import Deployment, Devices
from plait.inference.load import needs_of
from plait.inference.pass_times import PassTimes
from plait.inference.placement import Needs
from plait.inference.prediction import CopyRates
from plait.inference.quantised import CODES
from plait.planner import frameworks
from plait.planner.constants import knowledge
from plait.planner.hardware import Device, only
from plait.planner.traffic import BASE, INSIDE_STEP

_PRECISION = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def devices_of(device: Device, count: int | None) -> Devices:
    """A machine with `count` such devices (as many as it usually has), with nothing else on them."""
    return Devices(
        on_gpu=not bool(device.on_cpu),
        count=count or int(only(device.devices_per_node)),
        memory_bytes=int(only(device.memory_bytes)),
        host_bytes=int(ROOM * only(device.host_memory_bytes) * (count or only(device.devices_per_node))),
    )


@dataclass(frozen=True)
class _Pass:
    """One forward over `rows` tokens, of requests that see `seen` tokens each."""

    rows: int
    requests: int
    seen: float


def pass_times(model: nn.Module, device: Device, deployment: Deployment, *, prompt: int, new: int, requests: int) -> PassTimes:
    """Of `model` on meta, with quantised layers where they are to be."""
    first = _seconds(model, device, deployment, _Pass(requests * prompt, requests, prompt / 2))
    token = _seconds(model, device, deployment, _Pass(requests, requests, prompt + new / 2))
    source = f"datasheet of {device.title} and the planner's constants; no generation was measured on one"
    return PassTimes(sum(first), sum(token), token[0], source)


def copy_rates(device: Device, files: float | None) -> CopyRates:
    """From host memory by the datasheet; `files` was given by the user."""
    return CopyRates(files, float(only(device.host_bandwidth)), source=f"{device.title}'s link to its host, by its datasheet")


def _seconds(model: nn.Module, device: Device, deployment: Deployment, one: _Pass) -> tuple[float, float]:
    """(of the layers, of what is outside of them)."""
    constants, dtype = knowledge().rates, compute_dtype(model)
    precision = _PRECISION.get(str(dtype).removeprefix("torch."), "fp32")
    if precision not in device.flops:
        raise InputError(f"--dtype: {device.title} has no {precision} in the catalogue; it has {', '.join(device.flops)}")
    peak = float(only(device.flops[precision])) * float(only(constants.by_family("gemm", device)))
    bandwidth = float(only(device.memory_bandwidth)) * float(only(constants.on("memory", device)))
    config: Any = model.config
    needs = needs_of(model, requests=one.requests, tokens=round(one.seen))
    tp = deployment.tp
    inner, outer = _weights(model)
    cache = needs.cache(tp, 1)  # stages work one after the other
    attention = 4 * one.rows * one.seen * config.get_text_config(decoder=True).hidden_size * needs.layers / tp
    computing = (2 * one.rows * inner.parameters / tp + attention) / peak
    moving = (inner.nbytes / tp + cache + inner.dense_bytes / tp) / bandwidth
    host = needs.layers * frameworks.plait(precision=precision).host_seconds * float(only(constants["host"]))
    layers = max(computing, moving, host) + _all_reduces(needs, device, tp, one.rows * hidden_bytes(config, dtype.itemsize))
    head = max(2 * one.requests * outer.parameters / tp / peak, outer.nbytes / tp / bandwidth)
    return layers, head


def hidden_bytes(config: Any, itemsize: int) -> int:
    """Of the hidden states of one token."""
    return int(config.get_text_config(decoder=True).hidden_size) * itemsize


@dataclass(frozen=True)
class _Weights:
    parameters: int
    nbytes: int
    dense_bytes: int
    """That are written and read again of quantised layers, which are made dense before they are multiplied with."""


def _weights(model: nn.Module) -> tuple[_Weights, _Weights]:
    """(that every token passes, of the head). Routed experts count in full: a batch may need all of them."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    table = getattr(model, "get_input_embeddings", lambda: None)()
    outside = {id(p) for module in (head, table) if module is not None for p in module.parameters()}
    parameters = nbytes = dense = 0
    itemsize = compute_dtype(model).itemsize
    for name, p in model.named_parameters():
        if id(p) in outside:
            continue
        count = p.numel() * (2 if str(p.dtype) == "torch.uint8" else 1)
        nbytes += p.numel() * p.element_size()
        parameters += count
        dense += 2 * count * itemsize if name.endswith(CODES) else 0
    last = sum(p.numel() for p in head.parameters()) if head is not None else 0
    return _Weights(parameters, nbytes, dense), _Weights(last, last * itemsize, 0)


def _all_reduces(needs: Needs, device: Device, tp: int, size: int) -> float:
    """Two of a layer."""
    if tp == 1:
        return 0.0
    constants = knowledge().rates
    link = float(only(device.link_bandwidth)) * float(only(constants.on("link", device)))
    wire = 2 * size * (tp - 1) / tp / link
    fixed = float(only(constants.on("latency", device))) * (BASE + 2 * (tp - 1) * INSIDE_STEP)
    return 2 * needs.layers * (wire + fixed)
