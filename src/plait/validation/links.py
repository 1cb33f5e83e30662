"""Rates of the links, measured: between host and device, and of collectives between devices, beside those that the planner assumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from plait.cluster import accelerator
from plait.comm.measure import measure_group
from plait.errors import InputError
from plait.planner.hardware import device as device_of
from plait.units import MIB
from plait.validation.context import Context, timed
from plait.validation.rows import Found, NotRun, compared

LEAST = 0.5
"""Of the rate that the planner assumes: below it a plan for this machine is wrong by more than its interval."""
_COPIED, _ROUNDS = 256 * MIB, 5


def assumed(context: Context) -> Any:
    """The catalogue's figures of this device; raises NotRun where it has none."""
    name = "h100" if context.simulated else accelerator.model_name(context.device)
    try:
        return device_of(name)
    except InputError as error:
        raise NotRun(str(error)) from None


def host(context: Context, settings: Mapping[str, Any]) -> Found:
    """Copies between pinned host memory and the device, each way, and both at once."""
    figure = float(assumed(context).host_bandwidth)
    numel = (MIB if context.simulated else _COPIED) // 4
    pinned = [torch.empty(numel, pin_memory=True) for _ in range(2)]
    there = [torch.empty(numel, device=context.device) for _ in range(2)]
    streams = [accelerator.new_stream(context.device) for _ in range(2)]

    def copy(ways: tuple[int, ...]) -> None:
        for way in ways:
            with accelerator.on_stream(streams[way]):
                target, source = (there[0], pinned[0]) if way == 0 else (pinned[1], there[1])
                target.copy_(source, non_blocking=True)

    rates = {
        name: len(ways) * 4 * numel / _seconds(context, lambda ways=ways: copy(ways))  # type: ignore[misc]
        for name, ways in (("to_device", (0,)), ("to_host", (1,)), ("both", (0, 1)))
    }
    problems = [slower(name, rates[name], figure) for name in ("to_device", "to_host")]
    return timed(context, compared([one for one in problems if one], **rates, assumed=figure, least_share=LEAST))


def collectives(context: Context, settings: Mapping[str, Any]) -> Found:
    """All-reduce, all-gather, reduce-scatter and exchange over all ranks."""
    figure = float(assumed(context).link_bandwidth)
    mesh = context.group()
    group = mesh.group("dp_replicate")
    assert group is not None
    found = measure_group("dp_replicate", group, None, device=context.device, seconds=0.2 if context.simulated else 6.0)
    # Bytes that a ring moves over a link, of a tensor's: all ranks but one, twice in an all-reduce.
    ranks = context.world
    moved = {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "all_gather": (ranks - 1) / ranks,
        "reduce_scatter": (ranks - 1) / ranks,
        "exchange": 1.0,
    }
    rates = {
        name: moved[name] / cost.seconds_per_byte for name, cost in found.whole.costs.items() if name in moved and cost.seconds_per_byte
    }
    problem = slower("all_reduce", rates["all_reduce"], figure) if "all_reduce" in rates else "no all-reduce was measured"
    costs = {name: asdict(cost) for name, cost in found.whole.costs.items()}
    return timed(context, compared([problem] if problem else [], rates=rates, assumed=figure, least_share=LEAST, costs=costs))


def slower(name: str, rate: float, figure: float) -> str:
    """What is wrong with a rate; empty for nothing."""
    if rate >= LEAST * figure:
        return ""
    return f"{name}: {rate / 1e9:.1f} GB/s, and the planner assumes {figure / 1e9:.1f} GB/s"


def copy_rate(context: Context, nbytes: int) -> float:
    """Bytes a second of copies of `nbytes` from pinned memory to the device."""
    pinned, there = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), torch.empty(nbytes, dtype=torch.uint8, device=context.device)
    return nbytes / _seconds(context, lambda: there.copy_(pinned, non_blocking=True))


def _seconds(context: Context, operation: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS + 1):
        context.synchronize()
        began = time.perf_counter()
        operation()
        context.synchronize()
        times.append(time.perf_counter() - began)
    return median(times[1:])
