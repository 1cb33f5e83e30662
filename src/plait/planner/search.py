"""The search: every candidate layout priced in closed form, those that do not fit told apart by what they lack, the fastest kept.

`plan` is the one function to call, from a command or from whatever meets "auto" in a configuration. Nothing here prints or writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import erf, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import InputError, Problem, refuse
from plait.planner.calibrate import Calibration, deviation, memory_of, merged, time_of, uncalibrated
from plait.planner.constants import Rates
from plait.planner.estimate import Estimate, estimate
from plait.planner.frameworks import plait, with_compiled_blocks
from plait.planner.hardware import PRECISIONS, Cluster
from plait.planner.job import SCHEDULES, Job, Layouts
from plait.planner.memory import MOMENTS, States
from plait.planner.memory import TERMS as MEMORY_TERMS
from plait.planner.models import Model
from plait.planner.offers import EVERYTHING, Offers, offered
from plait.planner.simulate import simulated_terms
from plait.planner.space import Excluded, Space, build_space
from plait.planner.splits import Split, split_of
from plait.planner.states import account_states
from plait.planner.step import TERMS
from plait.units import GIB

_CHUNK = 1 << 15
"""Candidates priced at a time, so that arrays stay in the cache."""
_CERTAIN = 0.9
"""A plan fits with at least this probability."""
_MOST_SIMULATED = 50
"""So many of the best are simulated by their schedule's table."""
_HOST_SHARE = 0.8
"""Of a node's memory, what states may take."""
_NINETY = 1.645


@dataclass(frozen=True)
class Request:
    """What is planned."""

    model: Model
    cluster: Cluster
    global_batch: int
    """Samples of an optimizer step."""
    sequence: int
    """Tokens of a sample."""
    precision: str = "bf16"
    compile: bool = False
    everything: bool = False
    """Also what this version does not run."""
    optimizer_states: str = "own"
    """The form of AdamW's averages (`optimizer.states`)."""
    reduce: str = "fp32"
    """What gradients are reduced in: bf16, fp16 or fp32."""

    @property
    def offers(self) -> Offers:
        """What the search may propose."""
        found = EVERYTHING if self.everything else offered(compiled=self.compile)
        return found if self.optimizer_states == "own" else replace(found, offload=False)

    @property
    def split(self) -> Split:
        """What tensor parallelism may do to the model."""
        return split_of(self.model.architecture, self.model.section.get("config") or {})


@dataclass(frozen=True)
class Choice:
    """One layout with what it is predicted to cost. Seconds and bytes; intervals are of 90 %."""

    layout: Mapping[str, Any]
    seconds: float
    seconds_low: float
    seconds_high: float
    tokens_per_second: float
    mfu: float
    """Share of the devices' peak in the computation's precision; model FLOPs, causal attention counted by half, no recomputation."""
    terms: Mapping[str, float]
    allocated: float
    reserved: float
    needed: float
    """With the device's context."""
    needed_high: float
    fit_probability: float
    memory_terms: Mapping[str, float]
    moment: str

    @property
    def schedule(self) -> str:
        """Its name."""
        return SCHEDULES[int(self.layout["schedule"])]


@dataclass(frozen=True)
class Shortage:
    """A region of the space in which nothing fits: what its smallest candidate needs."""

    region: str
    candidates: int
    needed: float
    room: float
    parts: tuple[tuple[str, float], ...]
    """The largest terms of it."""

    def __str__(self) -> str:
        parts = ", ".join(f"{MEMORY_TERMS[name]} {size / GIB:.1f}" for name, size in self.parts)
        return f"needs {self.needed / GIB:.1f} of {self.room / GIB:.1f} GiB: {parts}"


@dataclass(frozen=True)
class Plan:
    """The outcome of a search."""

    request: Request
    best: tuple[Choice, ...]
    """Fastest first; of layouts that agree in tp, pp, schedule and ZeRO stage the fastest."""
    candidates: int
    fitting: int
    excluded: tuple[Excluded, ...]
    shortages: tuple[Shortage, ...]


def plan(
    request: Request,
    *,
    fixed: Mapping[str, int] | None = None,
    calibration: Calibration | None = None,
    best: int = 5,
) -> Plan:
    """Search. `fixed` are fields of a layout that must have a value (`space.parse_fixed`), `calibration` constants of this machine.

    Raises ConfigError where the rules leave no candidate, InputError where the device cannot compute so.
    """
    _check(request)
    calibration = calibration or uncalibrated()
    rates = merged(calibration)
    space = space_of(request, fixed)
    seconds, needed = price_space(request, space, rates)
    room = float(request.cluster.device.memory_bytes)
    fits = needed <= room
    shortages = _shortages(request, space, needed, room, rates)
    chosen = _fastest(request, space, seconds, needed, room, calibration, best)
    return Plan(request, tuple(chosen), space.size, int(fits.sum()), space.excluded, shortages)


def price(request: Request, layouts: Sequence[Mapping[str, Any]], *, calibration: Calibration | None = None) -> list[Choice]:
    """What given layouts cost, fitting or not."""
    _check(request)
    return _choices(request, Layouts.of(layouts), calibration or uncalibrated())


def job_of(request: Request, layouts: Layouts) -> Job:
    """Candidates of a request as something to price."""
    model = request.model.architecture
    found = plait(precision=request.precision)
    if request.compile:
        found = with_compiled_blocks(found)
    found = replace(found, wire_reduce=4 if request.reduce == "fp32" else 2)
    return Job(
        model=model,
        device=request.cluster.device,
        framework=found,
        layouts=layouts,
        sequence=request.sequence,
        precision=PRECISIONS.index(request.precision),
        own=not request.compile and not model.experts,
        whole_attention=request.split.whole_attention,
    )


def space_of(request: Request, fixed: Mapping[str, int] | None = None) -> Space:
    """Every candidate of a request. Raises ConfigError where the rules leave none."""
    return build_space(
        request.model.architecture,
        request.cluster,
        global_batch=request.global_batch,
        offers=request.offers,
        split=Split() if request.everything else request.split,
        fixed=fixed,
    )


def _check(request: Request) -> None:
    device = request.cluster.device
    problems = []
    if request.global_batch < 1:
        problems.append(Problem("--batch", request.global_batch, "a step has at least one sample", "give the samples of an optimizer step"))
    if request.sequence < 1:
        problems.append(Problem("--seq", request.sequence, "a sample has at least one token", "give the tokens of a sample"))
    refuse(problems)
    if np.isnan(device.flops.get(request.precision, np.nan)):
        has = ", ".join(p for p in ("bf16", "fp16", "fp32") if p in device.flops)
        raise InputError(f"--precision {request.precision}: {device.title} does not compute so; it has {has}")


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def estimate_of(request: Request, layouts: Layouts, rates: Rates) -> Estimate:
    """What candidates of a request cost."""
    job = job_of(request, layouts)
    return estimate(job, rates, states_of(request, job))


def states_of(request: Request, job: Job, *, inner: int | None = None) -> States:
    """Bytes of model states of its candidates, from the techniques' own accounts; `inner` is the rank to price between the ends of a
    pipeline, by default the one that keeps most."""
    compute = _DTYPES[request.precision] if request.precision != "fp32" else None
    return account_states(job, compute=compute, reduce=_DTYPES[request.reduce], inner=inner, form=request.optimizer_states)


def layouts_of(choice: Choice) -> Layouts:
    """A choice as the one candidate of what is priced."""
    return Layouts.of([choice.layout])


def price_space(request: Request, space: Space, rates: Rates) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(seconds, bytes needed) of every candidate; what the host cannot hold needs infinitely many."""
    seconds, needed = np.empty(space.size), np.empty(space.size)
    for start in range(0, space.size, _CHUNK):
        part = slice(start, min(start + _CHUNK, space.size))
        job = job_of(request, space.layouts.take(part))
        states = states_of(request, job)
        found = estimate(job, rates, states)
        seconds[part] = found.seconds
        # What the host cannot hold does not fit either, whatever the device has.
        host = np.maximum(states.first["host"], states.last["host"])
        needed[part] = np.where(host > _HOST_SHARE * request.cluster.device.host_memory_bytes, np.inf, found.memory.total)
    return seconds, needed


def _fastest(
    request: Request,
    space: Space,
    seconds: NDArray[np.float64],
    needed: NDArray[np.float64],
    room: float,
    calibration: Calibration,
    best: int,
) -> list[Choice]:
    """The fastest of every kind of layout that fit with enough certainty."""
    order = np.flatnonzero(needed <= room)
    order = order[np.argsort(seconds[order], kind="stable")]
    found: list[Choice] = []
    wanted = best if request.everything else min(max(2 * best, 6), _MOST_SIMULATED)
    seen: set[tuple[Any, ...]] = set()
    for start in range(0, len(order), 256):
        for choice in _choices(request, space.layouts.take(order[start : start + 256]), calibration):
            kind = tuple(choice.layout[name] for name in ("tp", "pp", "schedule", "vpp", "stage"))
            if choice.fit_probability >= _CERTAIN and kind not in seen:
                seen.add(kind)
                found.append(choice)
                if len(found) == wanted:
                    return walked(request, found, calibration)[:best]
        if start >= 4096 and found:
            break
    return walked(request, found, calibration)[:best]


def walked(request: Request, found: list[Choice], calibration: Calibration) -> list[Choice]:
    """Choices with their pipelines simulated by their own tables, fastest first."""
    rates = merged(calibration)
    refined = []
    for choice in found:
        terms = simulated_terms(job_of(request, layouts_of(choice)), rates, choice.terms)
        refined.append(choice if terms is None else _with_terms(choice, terms))
    return sorted(refined, key=lambda choice: choice.seconds)


def _with_terms(choice: Choice, terms: Mapping[str, float]) -> Choice:
    share = sum(terms.values()) / choice.seconds
    return replace(
        choice,
        terms=dict(terms),
        seconds=choice.seconds * share,
        seconds_low=choice.seconds_low * share,
        seconds_high=choice.seconds_high * share,
        tokens_per_second=choice.tokens_per_second / share,
        mfu=choice.mfu / share,
    )


def _choices(request: Request, layouts: Layouts, calibration: Calibration) -> list[Choice]:
    rates = merged(calibration)
    job = job_of(request, layouts)
    states = states_of(request, job)
    found = estimate(job, rates, states)
    count = np.size(layouts.tp)
    everywhere = job.mapped(lambda value: np.broadcast_to(np.asarray(value), (count,)), layouts)  # one entry a candidate
    time_spread = deviation(time_of(everywhere), calibration.time, everywhere)
    memory_spread = deviation(memory_of(everywhere, ["total"] * count), calibration.memory, everywhere)
    model = request.model.architecture
    tokens = request.global_batch * request.sequence
    flops = float(model.model_flops(request.sequence)) * tokens
    peak = float(request.cluster.device.flops[request.precision]) * request.cluster.devices
    room = float(request.cluster.device.memory_bytes)

    def each(value: Any) -> NDArray[np.float64]:
        return np.broadcast_to(np.asarray(value, float), (count,))

    memory, moment = found.memory, np.broadcast_to(found.memory.moment, (count,))
    terms = {name: each(value) for name, value in found.step.terms.items()}
    memory_terms = {name: each(value) for name, value in memory.terms.items()}
    seconds, total, allocated, reserved = map(each, (found.seconds, memory.total, memory.allocated, memory.reserved))
    return [
        Choice(
            layout=layouts.at(i),
            seconds=float(seconds[i]),
            seconds_low=float(seconds[i] * np.exp(-_NINETY * time_spread[i])),
            seconds_high=float(seconds[i] * np.exp(_NINETY * time_spread[i])),
            tokens_per_second=tokens / float(seconds[i]),
            mfu=flops / peak / float(seconds[i]),
            terms={name: float(terms[name][i]) for name in TERMS},
            allocated=float(allocated[i]),
            reserved=float(reserved[i]),
            needed=float(total[i]),
            needed_high=float(total[i] * np.exp(_NINETY * memory_spread[i])),
            fit_probability=0.5 * (1 + erf(float((np.log(room) - np.log(total[i])) / memory_spread[i]) / sqrt(2))),
            memory_terms={name: float(memory_terms[name][i]) for name in MEMORY_TERMS},
            moment=MOMENTS[int(moment[i])],
        )
        for i in range(count)
    ]


def _shortages(request: Request, space: Space, needed: NDArray[np.float64], room: float, rates: Rates) -> tuple[Shortage, ...]:
    """For every (tp, pp, stage) of which nothing fits: what the smallest of it needs."""
    at = space.layouts
    key = (np.asarray(at.tp) * 4096 + np.asarray(at.pp)) * 4 + np.asarray(at.stage)
    order = np.lexsort((needed, key))
    firsts = order[np.concatenate([[True], np.diff(key[order]) != 0])]
    smallest = firsts[(needed[firsts] > room) & np.isfinite(needed[firsts])]
    if not len(smallest):
        return ()
    counts = dict(zip(*np.unique(key, return_counts=True), strict=True))
    found = estimate_of(request, at.take(smallest), rates).memory
    shortages = []
    for position, index in enumerate(smallest):
        parts = sorted(
            ((name, float(np.broadcast_to(value, len(smallest))[position])) for name, value in found.terms.items()), key=lambda p: -p[1]
        )
        one = at.at(int(index))
        pipeline = f" pp={one['pp']}" if request.offers.pipeline else ""
        shortages.append(
            Shortage(
                f"tp={one['tp']}{pipeline} stage={one['stage']}", int(counts[key[index]]), float(needed[index]), room, tuple(parts[:3])
            )
        )
    return tuple(shortages)
