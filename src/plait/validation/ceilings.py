"""Measured peak rates of the machine: memory, matrix multiplications, host link, collectives."""

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
from plait.planner.hardware import DeviceSpec
from plait.planner.hardware import device as device_of
from plait.sizes import GIB, MIB
from plait.validation.context import Context, timed
from plait.validation.rows import NotRun, Verdict, verdict

LEAST_SHARE = 0.5
"""Share of the planner's figure below which a row fails: plans for this device would be far off."""
PRODUCT_SIZE = 8192
_ROUNDS = 5
_CALLS = 10
"""Calls of an operation between two waits. Launches and the wait itself are then negligible."""


def device(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Measure the rates of a copy on the device and of a large bfloat16 matrix multiplication."""
    figures = datasheet(context)
    size = context.size(PRODUCT_SIZE, small=64)
    nbytes = context.size(GIB, small=MIB)

    copied = copies_on_device(context, nbytes)
    left = torch.randn(size, size, dtype=torch.bfloat16, device=context.device)
    right = torch.randn_like(left)
    # A product of n-cubed has n**3 multiplications and as many additions.
    flops = 2 * size**3 / seconds_of(context, lambda: torch.mm(left, right))

    bandwidth = float(figures.memory_bandwidth)
    # A device without bfloat16 has no figure. Comparisons with NaN never fail.
    peak = float(figures.flops.get("bf16", float("nan")))
    numbers = {
        "copy_bytes_per_second": copied,
        "copy_share_of_datasheet": copied / bandwidth,
        "product_flops_per_second": flops,
        "product_share_of_datasheet": flops / peak,
        "datasheet": {"memory_bandwidth": bandwidth, "bfloat16_flops": peak},
        "least_share": LEAST_SHARE,
    }
    problems = [too_slow("copy", copied, bandwidth), too_slow("product", flops, peak)]
    return timed(context, verdict(problems, **numbers))


def copies_on_device(context: Context, nbytes: int) -> float:
    """Return the bytes per second, read plus written, of copies of `nbytes` on the device."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    # A copy reads every byte and writes it.
    return 2 * nbytes / seconds_of(context, lambda: target.copy_(source))


def host_link(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Measure copies between pinned host memory and the device, one way and both ways at once."""
    figure = float(datasheet(context).host_bandwidth)
    nbytes = context.size(256 * MIB, small=MIB)
    pin = accelerator.is_accelerator(context.device)
    on_host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
    on_device = [torch.empty(nbytes, dtype=torch.uint8, device=context.device) for _ in range(2)]
    # Two streams, because copies of one stream run one after another and would not overlap.
    streams = [accelerator.new_stream(context.device) if pin else None for _ in range(2)]

    def to_device() -> None:
        with accelerator.on_stream(streams[0]):
            on_device[0].copy_(on_host[0], non_blocking=True)

    def to_host() -> None:
        with accelerator.on_stream(streams[1]):
            on_host[1].copy_(on_device[1], non_blocking=True)

    def both() -> None:
        to_device()
        to_host()

    rates = {
        "to_device": nbytes / seconds_of(context, to_device),
        "to_host": nbytes / seconds_of(context, to_host),
        "both": 2 * nbytes / seconds_of(context, both),
    }
    # The datasheet gives the rate of one direction, so `both` is only reported.
    problems = [too_slow(name, rates[name], figure) for name in ("to_device", "to_host")]
    numbers = {**rates, "datasheet": figure, "least_share": LEAST_SHARE}
    return timed(context, verdict(problems, **numbers))


def datasheet(context: Context) -> DeviceSpec:
    """Return the datasheet figures of this device, as the planner has them.

    For a simulated device or a CPU, they are those of an H100, so that the check can run.

    Raises:
        NotRun: The planner does not know the device.
    """
    name = "h100" if context.is_small else accelerator.model_name(context.device)
    try:
        return device_of(name)
    except InputError as error:
        raise NotRun(str(error)) from None


def bfloat16_peak(figures: DeviceSpec) -> float:
    """Return the FLOP/s of bfloat16 matrix multiplications on a device.

    Raises:
        NotRun: The device does not support bfloat16.
    """
    if "bf16" not in figures.flops:
        raise NotRun(
            f"this check computes in bfloat16, which {figures.title} does not support; run it on a"
            " GPU with bfloat16"
        )
    return float(figures.flops["bf16"])


def too_slow(name: str, rate: float, figure: float) -> str:
    """Return why a rate is too low compared with the datasheet, or "" if it is not.

    If `figure` is NaN the result is "".
    """
    if not rate < LEAST_SHARE * figure:
        return ""
    return (
        f"{name}: {rate / 1e9:.1f} G per second, less than half of the datasheet's"
        f" {figure / 1e9:.1f}"
    )


def copy_rate(context: Context, nbytes: int) -> float:
    """Return the bytes per second of copies of `nbytes` from pinned host memory to the device."""
    pin = accelerator.is_accelerator(context.device)
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)
    target = torch.empty(nbytes, dtype=torch.uint8, device=context.device)
    return nbytes / seconds_of(context, lambda: target.copy_(source, non_blocking=True))


def seconds_of(context: Context, operation: Callable[[], object], *, calls: int = _CALLS) -> float:
    """Return the median seconds per call over several rounds of calls.

    The host waits for the device before and after every round.
    """
    calls = context.size(calls, small=1)
    rounds = context.size(_ROUNDS, small=1)
    # The first call loads the kernel.
    operation()
    return median(seconds_per_call(context, operation, calls) for _ in range(rounds))


def seconds_per_call(context: Context, operation: Callable[[], object], calls: int) -> float:
    """Return the mean seconds of `calls` calls. The host waits for the device before and after."""
    context.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        operation()
    context.synchronize()
    return (time.perf_counter() - started) / calls


def collectives(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Measure all-reduce, all-gather, reduce-scatter and all-to-all over all ranks."""
    figure = float(datasheet(context).link_bandwidth)
    group = context.group().group("dp_replicate")
    assert group is not None
    seconds = context.size(6.0, small=0.2)
    measured = measure_group("dp_replicate", group, None, device=context.device, seconds=seconds)

    # Share of a tensor's bytes that a ring sends over each link. An all-reduce passes it twice.
    ranks = context.world
    sent = {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "all_gather": (ranks - 1) / ranks,
        "reduce_scatter": (ranks - 1) / ranks,
        "exchange": 1.0,
    }
    rates = {}
    for name, cost in measured.whole.costs.items():
        if name in sent and cost.seconds_per_byte:
            rates[name] = sent[name] / cost.seconds_per_byte
    problem = "no all-reduce was measured"
    if "all_reduce" in rates:
        problem = too_slow("all_reduce", rates["all_reduce"], figure)
    numbers = {
        "rates": rates,
        "datasheet": figure,
        "least_share": LEAST_SHARE,
        "costs": {name: asdict(cost) for name, cost in measured.whole.costs.items()},
    }
    return timed(context, verdict([problem], **numbers))
