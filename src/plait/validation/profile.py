"""Profile of training steps: kernels, gaps, idle times, and synchronizations with the device.

A "wait" is an operation in which the host waits for the device. Meanwhile the queue of kernels runs
empty, and the device then idles until the host has launched the next kernels. torch reports waits
as Python warnings (`torch.cuda.set_sync_debug_mode`). Autograd repeats the warnings of the
backward's threads on the calling thread.

Note [Steps in a trace]
    Steps are marked with `record_function`. On the device, the profiler shows such a range from the
    first to the last kernel that the range's thread has launched. The main thread launches the
    first kernel of a step (forward) and the last one (optimizer), so the range also covers the
    backward, whose kernels another thread launches.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, record_function

from plait.cluster import accelerator
from plait.engine.build import initialize
from plait.losses.loss import causal_lm_loss
from plait.validation.context import (
    STRUCTURE,
    TINY,
    Context,
    on_device,
    random_batch,
    require,
    step_settings,
    timed,
)
from plait.validation.rows import Verdict, verdict
from plait.validation.throughput import TRAINERS, WARM_STEPS, first_workload

STEPS = 3
STEP_MARK = "plait validation step"
_LONGEST = 12
"""Number of kernels that are reported, those with the most time first."""
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")

Interval = tuple[float, float]
"""(begin, end) in seconds."""
Kind = Literal["products", "attention", "collectives", "copies", "other"]
_NAME_PARTS: Mapping[Kind, tuple[str, ...]] = {
    "collectives": ("nccl",),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "products": ("gemm", "cutlass", "xmma", "nvjet", "cublas", "matmul"),
}


@dataclass(frozen=True)
class Event:
    """Kernel, copy, step range or host call in a profiler trace, with its start and end."""

    name: str
    begin: float
    end: float
    """Seconds."""
    place: Literal["device", "mark", "host"]
    """Kind of event: a kernel or copy (`device`), the range of a step (`mark`), or a host call."""


def step(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Profile steps of `settings["contender"]` on the workload of `throughput`."""
    require("transformers")
    context.group()
    workload = first_workload(context)
    batch = random_batch(workload, context.device, seed=context.rank)
    trainer = TRAINERS[settings["contender"]](context, workload)
    try:
        for _ in range(WARM_STEPS):
            trainer.step(batch)
        context.synchronize()
        with profile(activities=accelerator.profiler_activities()) as recorded:
            for _ in range(STEPS):
                with record_function(STEP_MARK):
                    trainer.step(batch)
            context.synchronize()
    finally:
        trainer.close()
        del trainer
        context.release_memory()
    numbers = analyse(events_of(recorded), STEPS)
    problems = [] if numbers["kernels_per_step"] else ["the profiler recorded no kernel"]
    return timed(context, verdict(problems, workload=workload.as_dict(), **numbers))


def events_of(recorded: profile) -> list[Event]:
    """Return the kernels, copies, step ranges and host calls of a profile, for `analyse`."""
    events = []
    for event in recorded.events() or ():
        place: Literal["device", "mark", "host"] = "host"
        if event.device_type != DeviceType.CPU:
            if event.name == STEP_MARK:
                place = "mark"
            elif event.is_user_annotation:
                # Another range around kernels, such as one of FSDP's.
                continue
            else:
                place = "device"
        elif event.name not in (*_WAITS, *_LAUNCHES):
            continue
        # The profiler has microseconds.
        begin = event.time_range.start / 1e6
        end = event.time_range.end / 1e6
        events.append(Event(event.name, begin, end, place))
    return events


def analyse(events: Sequence[Event], steps: int) -> dict[str, Any]:
    """Return statistics of kernels, gaps and idle time, most of them averaged over steps."""
    on_device: list[Interval] = []
    marks: list[Interval] = []
    on_host: Counter[str] = Counter()
    by_kind: dict[Kind, list[Interval]] = defaultdict(list)
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in events:
        interval = (event.begin, event.end)
        if event.place == "mark":
            marks.append(interval)
        elif event.place == "host":
            on_host[event.name] += 1
        else:
            on_device.append(interval)
            by_kind[kind_of(event.name)].append(interval)
            by_name[event.name].append(event.end - event.begin)

    # Kernels of several streams overlap. The device is idle only when none of them runs.
    busy = union(on_device)
    span = busy[-1][1] - busy[0][0] if busy else 0.0
    gaps = [after[0] - before[1] for before, after in pairwise(busy)]
    between = [after[0] - before[1] for before, after in pairwise(sorted(marks))]

    computed: list[Interval] = []
    for kind, intervals in by_kind.items():
        if kind not in ("collectives", "copies"):
            computed += intervals
    computing = union(computed)
    # Communication that no computation hides lengthens the step.
    exposed = {
        kind: total(outside(union(by_kind[kind]), computing)) / steps
        for kind in ("collectives", "copies")
        if by_kind.get(kind)
    }
    longest = sorted(by_name.items(), key=lambda entry: -sum(entry[1]))[:_LONGEST]
    return {
        "steps": steps,
        "seconds_per_step": span / steps,
        "kernels_per_step": len(on_device) / steps,
        "launches_per_step": sum(on_host[name] for name in _LAUNCHES) / steps,
        "busy_seconds_per_step": total(busy) / steps,
        "idle_share": sum(gaps) / span if span else 0.0,
        "gaps_per_step": len(gaps) / steps,
        "median_gap_seconds": median(gaps) if gaps else 0.0,
        "longest_gap_seconds": max(gaps, default=0.0),
        "idle_seconds_between_steps": median(between) if between else None,
        "host_waits_per_step": {name: on_host[name] / steps for name in _WAITS if on_host[name]},
        "seconds_per_step_by_kind": {
            kind: total(union(intervals)) / steps for kind, intervals in by_kind.items()
        },
        "exposed_seconds_per_step": exposed,
        "longest_kernels": [
            {
                "name": name[:120],
                "per_step": len(seconds) / steps,
                "seconds_per_step": sum(seconds) / steps,
            }
            for name, seconds in longest
        ],
    }


def kind_of(name: str) -> Kind:
    """Return the kind of a kernel or copy, such as attention, from its name."""
    lowered = name.lower()
    if lowered.startswith("memcpy"):
        # Only copies between host and device use the link.
        return "copies" if "htod" in lowered or "dtoh" in lowered else "other"
    for kind, parts in _NAME_PARTS.items():
        if any(part in lowered for part in parts):
            return kind
    return "other"


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals sorted and merged, so that none overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    """Return the total seconds of intervals, which must not overlap."""
    return sum(end - begin for begin, end in intervals)


def outside(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the parts of `intervals` outside all `others`. Both must be sorted and disjoint."""
    parts = []
    first = 0
    for begin, end in intervals:
        covered = begin
        # Both lists are sorted, so what ends before this interval ends before all later ones.
        while first < len(others) and others[first][1] <= begin:
            first += 1
        for low, high in others[first:]:
            if low >= end:
                break
            if low > covered:
                parts.append((covered, low))
            covered = max(covered, high)
        if covered < end:
            parts.append((covered, end))
    return parts


COUNTED_STEPS = 5
NO_WARNINGS = "a simulated device does not warn of waits; the steps ran to their end"
_MESSAGE = "called a synchronizing CUDA operation"
_PLACES = 10
"""Number of places that are reported, those with the most waits first."""


def per_step(context: Context, settings: Mapping[str, Any]) -> Verdict:
    """Compare the waits per training step of `settings["config"]` with `settings["expected"]`.

    A wait is an operation in which the host waits for the device. A float16 step has one, because
    the host reads whether gradients overflowed before it updates the parameters.
    """
    require("transformers")
    context.group()
    places = waits_of_config(context, settings["config"])
    if context.is_small:
        return Verdict("not run", NO_WARNINGS)
    return judge(places, COUNTED_STEPS, settings["expected"])


def waits_of_config(context: Context, config: Mapping[str, Any]) -> Counter[str]:
    """Train with a configuration, and return the waits of COUNTED_STEPS steps per source line."""
    workload = context.size(STRUCTURE, small=TINY)
    resolved = step_settings(config, workload, world=context.world)
    model = on_device(workload, context.device)
    engine = initialize(model, resolved, loss_fn=causal_lm_loss, total_steps=100)
    # The batch is on the device, because the work of a data loader is not part of a step.
    batch = random_batch(workload, context.device, seed=context.rank)
    try:
        for _ in range(WARM_STEPS):
            engine.train_batch(batch)
        context.synchronize()
        return waits_of(lambda: engine.train_batch(batch), COUNTED_STEPS, context.device)
    finally:
        engine.close()


def waits_of(step: Callable[[], object], steps: int, device: torch.device) -> Counter[str]:
    """Run steps, and return the number of waits for the device per source line (`file:line`)."""
    with warnings.catch_warnings(record=True) as caught, accelerator.warning_of_waits(device):
        # By default Python shows a warning once per place.
        warnings.simplefilter("always")
        for _ in range(steps):
            step()
    return Counter(
        f"{_below_package(warning.filename)}:{warning.lineno}"
        for warning in caught
        if _MESSAGE in str(warning.message)
    )


def judge(places: Counter[str], steps: int, expected: int) -> Verdict:
    """Return a failed verdict if steps wait for the device more often than expected."""
    per_step = places.total() / steps
    numbers = {
        "waits_per_step": per_step,
        "expected_per_step": expected,
        "places": dict(places.most_common(_PLACES)),
    }
    where = ", ".join(f"{place} ({count})" for place, count in places.most_common(3))
    problem = f"{per_step:g} waits per step, {expected} expected; in {steps} steps: {where}"
    return verdict([problem] if per_step > expected else [], **numbers)


def _below_package(filename: str) -> str:
    for folder in ("/plait/", "/torch/", "/transformers/"):
        if folder in filename:
            return folder.strip("/") + "/" + filename.rsplit(folder, 1)[1]
    return filename.rsplit("/", 1)[-1]
