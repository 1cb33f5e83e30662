"""How much of the time of copies and of collectives a training step hides under its computation, from a trace of torch's profiler.

Exposed is what runs on the device while nothing computes there; its share is of the steps' time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import profile

from plait.cluster import accelerator
from plait.engine.build import initialize
from plait.losses.loss import causal_lm_loss
from plait.units import GIB
from plait.validation.context import Context, require, sized, timed
from plait.validation.memory import LARGE, MEDIUM, SMALL, TINY, built, random_batch, step_settings
from plait.validation.rows import Found, compared

LEAST_HIDDEN = 0.05
"""Of the time of copies or collectives: where less is under computation, nothing overlaps."""
SIZES: Mapping[str, Mapping[str, Any]] = {
    "large": {"model": LARGE, "samples": 2, "length": 2048},
    "medium": {"model": MEDIUM, "samples": 4, "length": 1024},
    "small": {"model": SMALL, "samples": 4, "length": 512},
    "tiny": {"model": TINY, "samples": 1, "length": 32},
}
NEEDED = {"large": 40 * GIB, "medium": 14 * GIB, "small": 4 * GIB, "tiny": 1 * GIB}
STEPS = 3

Interval = tuple[float, float]


def trace(context: Context, settings: Mapping[str, Any]) -> Found:
    """A few steps of `settings["config"]`; `settings["kind"]` is what must overlap, `collectives` or `copies`."""
    require("transformers")
    size = sized(context, SIZES, least_bytes=NEEDED)
    context.group()
    model = built(size["model"], size["length"])
    resolved = step_settings(settings["config"], samples=size["samples"], world=context.world)
    engine = initialize(model, resolved, loss_fn=causal_lm_loss, total_steps=STEPS + 2)
    try:
        batch = random_batch(resolved.batch, size["length"], vocabulary=size["model"]["vocab_size"], seed=engine.dp_rank)
        for _ in range(2):
            engine.train_batch(batch)
        context.synchronize()
        with profile(activities=accelerator.profiled()) as recorded:
            for _ in range(STEPS):
                engine.train_batch(batch)
            context.synchronize()
        events = [
            (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in recorded.events() or ()
            if event.device_type != DeviceType.CPU and not event.is_user_annotation  # a range around kernels is none
        ]
    finally:
        engine.close()
        del engine, model
        gc.collect()
    return timed(context, shares(events, settings["kind"]))


def shares(events: Sequence[tuple[str, float, float]], kind: str) -> Found:
    """Of what ran on the device, (name, begin, end) in seconds: how much of `kind` was hidden."""
    groups: dict[str, list[Interval]] = {"compute": [], "collectives": [], "copies": []}
    for name, begin, end in events:
        groups[kind_of(name)].append((begin, end))
    merged = {name: union(found) for name, found in groups.items()}
    whole = union(interval for found in merged.values() for interval in found)
    span = whole[-1][1] - whole[0][0] if whole else 0.0
    if not merged["compute"] or not merged[kind]:
        missing = "computation" if not merged["compute"] else kind
        return compared([f"the profiler saw no {missing} on the device"])
    numbers: dict[str, Any] = {"seconds_a_step": span / STEPS, "least_hidden_share": LEAST_HIDDEN}
    for name in ("collectives", "copies"):
        total = length(merged[name])
        exposed = length(outside(merged[name], merged["compute"]))
        numbers[name] = {
            "seconds_a_step": total / STEPS,
            "exposed_share_of_step": exposed / span,
            "hidden_share": 1 - exposed / total if total else None,
        }
    hidden = numbers[kind]["hidden_share"]
    problem = f"{hidden:.1%} of the time of {kind} is under computation: nothing overlaps"
    return compared([problem] if hidden < LEAST_HIDDEN else [], **numbers)


def kind_of(name: str) -> str:
    """By the name of a kernel or copy on the device. A copy inside of the device's memory is computation."""
    lowered = name.lower()
    if accelerator.BACKEND in lowered:
        return "collectives"
    return "copies" if lowered.startswith("memcpy") and ("htod" in lowered or "dtoh" in lowered) else "compute"


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted, without overlaps."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Seconds of intervals that do not overlap."""
    return sum(end - begin for begin, end in intervals)


def outside(intervals: Sequence[Interval], of: Sequence[Interval]) -> list[Interval]:
    """The parts of `intervals` that are in none `of` the others; both without overlaps."""
    found = []
    for begin, end in intervals:
        at = begin
        for low, high in of:
            if high <= at or low >= end:
                continue
            if low > at:
                found.append((at, low))
            at = max(at, high)
        if at < end:
            found.append((at, end))
    return found
