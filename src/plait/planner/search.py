"""Search over all candidate layouts: estimate each, drop those that do not fit, rank the rest.

`plan` is the entry point, for commands and for "auto" in a configuration. Nothing here prints or
writes.

Note [Stages of a search]
    1. `space_of` creates all candidates that the rules allow: every layout once without
       memory-saving options and once with all of them (Note [Memory-saving options] in
       `plait.planner.techniques`).
    2. `estimate_space` estimates these candidates with closed-form expressions, at a few points in
       time of a step. For layouts that fit only with all options, it adds candidates with some
       options.
    3. `_fastest` takes the fastest candidates that fit, estimates them again at all points in time,
       now with 90 % intervals, and selects a few per family of layouts.
    4. `simulate_pipelines` simulates the pipelines of the selected candidates and sorts them by
       the result.

A `LayoutChoice` is a layout with its predicted costs. `ties` counts the layouts that are equally
fast within the uncertainty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import erf, exp, log, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.planner.calibrate import (
    Calibration,
    deviation,
    memory_of,
    merged_rates,
    relevant,
    sensitivity,
    time_of,
    uncalibrated,
)
from plait.planner.constants import Rates
from plait.planner.job import RECOMPUTE, SCHEDULES, Job, Layouts
from plait.planner.memory import MEMORY_TERMS as MEMORY_TERMS
from plait.planner.memory import MOMENTS, memory_bytes
from plait.planner.request import Request, check, estimate, job_of, states_of
from plait.planner.space import Excluded, Space, joined, space_of
from plait.planner.step_time import STEP_TERMS, simulated_terms
from plait.sizes import GIB

_TIE_PROBABILITY = 0.25
"""A layout ties with the first one if it is faster with at least this probability."""
_LAYOUT_SPREAD = 0.04
"""Noise of one layout of a model on one machine: the standard deviation of its logarithm."""
NINETY = 1.645
"""Half the width of a 90 % interval, in standard deviations."""


@dataclass(frozen=True)
class LayoutChoice:
    """Layout with its predicted cost in seconds and bytes. Low and high bound 90 % intervals."""

    layout: Mapping[str, Any]
    seconds: float
    seconds_low: float
    seconds_high: float
    tokens_per_second: float
    mfu: float
    """Model FLOPs utilization in the precision of the computation.

    Causal attention counts by half. Recomputation does not count.
    """
    terms: Mapping[str, float]
    """Seconds by term, which sum to `seconds`."""
    allocated: float
    reserved: float
    needed_bytes: float
    """Predicted peak bytes, including the context of the device."""
    needed_high_bytes: float
    fit_probability: float
    memory_terms: Mapping[str, float]
    """Allocated bytes at the peak by term."""
    moment: str
    """Point of the step at which the peak occurs, one of `memory.MOMENTS`."""

    @property
    def budget(self) -> float | None:
        """Bytes of activations at the peak if recomputation has a memory budget, else None."""
        if RECOMPUTE[int(self.layout["recompute"])] != "budget":
            return None
        return sum(self.memory_terms[name] for name in ("activations", "working", "logits"))

    @property
    def schedule(self) -> str:
        """Name of the pipeline schedule."""
        return SCHEDULES[int(self.layout["schedule"])]


def price(
    request: Request,
    layouts: Sequence[Mapping[str, Any]],
    *,
    calibration: Calibration | None = None,
) -> list[LayoutChoice]:
    """Predict the time and memory of layouts, including layouts that do not fit into memory.

    Args:
        request: Model, cluster and batch.
        layouts: Fields of `Layouts` as plain numbers, one mapping per layout.
        calibration: Constants of this machine. None uses those of the package.
    """
    check(request)
    return choices_of(request, Layouts.of(layouts), calibration or uncalibrated())


def simulate_pipelines(
    request: Request, choices: list[LayoutChoice], calibration: Calibration
) -> list[LayoutChoice]:
    """Replace the closed-form idle time of pipelines by a simulated one, and sort by the new time.

    Returns:
        The layouts with their new predicted times, fastest first.
    """
    rates = merged_rates(calibration)
    refined = []
    for choice in choices:
        terms = simulated_terms(job_of(request, Layouts.of([choice.layout])), rates, choice.terms)
        refined.append(choice if terms is None else _with_terms(choice, terms))
    return sorted(refined, key=lambda choice: choice.seconds)


def _with_terms(choice: LayoutChoice, terms: Mapping[str, float]) -> LayoutChoice:
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


def choices_of(request: Request, layouts: Layouts, calibration: Calibration) -> list[LayoutChoice]:
    """Predict the time and memory of layouts that are given as arrays. See `price`."""
    rates = merged_rates(calibration)
    job = job_of(request, layouts)
    estimated = estimate(job, rates, states_of(request, job))
    count = np.size(layouts.tp)
    # Intervals are computed from derivatives with one row per candidate, but a job may have
    # scalars.
    everywhere = _broadcast_job(job, count)
    time_spread = deviation(time_of(everywhere), calibration.time, everywhere)
    memory_spread = deviation(
        memory_of(everywhere, ["total"] * count), calibration.memory, everywhere
    )
    tokens = request.global_batch * request.sequence
    flops = float(request.model.architecture.model_flops(request.sequence)) * tokens
    peak = float(request.cluster.device.flops[request.precision]) * request.cluster.devices
    room = float(request.cluster.device.memory_bytes)

    def each(value: Any) -> NDArray[np.float64]:
        return np.broadcast_to(np.asarray(value, float), (count,))

    memory = estimated.memory
    moment = np.broadcast_to(memory.moment, (count,))
    terms = {name: each(value) for name, value in estimated.step.terms.items()}
    memory_terms = {name: each(value) for name, value in memory.terms.items()}
    seconds = each(estimated.seconds)
    total = each(memory.total)
    allocated = each(memory.allocated)
    reserved = each(memory.reserved)

    choices: list[LayoutChoice] = []
    for i in range(count):
        choices.append(
            LayoutChoice(
                layout=layouts.as_dict(i),
                seconds=float(seconds[i]),
                seconds_low=float(seconds[i] * np.exp(-NINETY * time_spread[i])),
                seconds_high=float(seconds[i] * np.exp(NINETY * time_spread[i])),
                tokens_per_second=tokens / float(seconds[i]),
                mfu=flops / peak / float(seconds[i]),
                terms={name: float(terms[name][i]) for name in STEP_TERMS},
                allocated=float(allocated[i]),
                reserved=float(reserved[i]),
                needed_bytes=float(total[i]),
                needed_high_bytes=float(total[i] * np.exp(NINETY * memory_spread[i])),
                fit_probability=0.5
                * (1 + erf(float((np.log(room) - np.log(total[i])) / memory_spread[i]) / sqrt(2))),
                memory_terms={name: float(memory_terms[name][i]) for name in MEMORY_TERMS},
                moment=MOMENTS[int(moment[i])],
            )
        )
    return choices


def _broadcast_job(job: Job, count: int) -> Job:
    """Return a job in which every number has one entry per candidate."""
    return job.mapped(lambda value: np.broadcast_to(np.asarray(value), (count,)), job.layouts)


def ties(request: Request, choices: Sequence[LayoutChoice], calibration: Calibration) -> int:
    """Return how many layouts at the start of `choices` may be as fast as the first one.

    A layout ties with the first one if the probability that it is the faster one is at least
    `_TIE_PROBABILITY`. Uncertainty that two layouts share, such as the speed of matrix
    multiplications, does not affect the result.
    """
    if not choices:
        return 0
    job = _broadcast_job(
        job_of(request, Layouts.of([choice.layout for choice in choices])), len(choices)
    )
    derivative = sensitivity(time_of(job), calibration.time, relevant(calibration.time.names, job))
    difference = derivative - derivative[0]
    spread = np.sqrt(
        # Variance of each difference: [choices, constants] x [constants, constants] -> [choices].
        np.einsum("ij,jk,ik->i", difference, calibration.time.covariance, difference)
        # Both layouts have noise of their own.
        + 2 * _LAYOUT_SPREAD**2
    )
    slower = np.log([choice.seconds / choices[0].seconds for choice in choices])
    tied = slower <= -NormalDist().inv_cdf(_TIE_PROBABILITY) * spread
    if tied.all():
        return len(choices)
    # The index of the first choice that does not tie.
    return int(np.argmin(tied))


_CHUNK = 1 << 15
"""Number of candidates that are estimated at a time, so that arrays stay in the cache."""
_FIT_PROBABILITY = 0.9
"""Probability of fitting into memory that a plan must have."""
_MAX_SIMULATED = 50
"""Largest number of layouts that are simulated. Usually twice the requested number."""
FAMILY = ("tp", "pp", "cp", "ep", "stage")
"""Fields that define a family of layouts. A plan shows the fastest layout of each family."""
_MAX_PER_FAMILY = 3
"""Largest number of layouts per family that are simulated."""
_HOST_SHARE = 0.8
"""Share of a node's memory that states may use."""


@dataclass(frozen=True)
class Shortage:
    """Combination of tp, pp and ZeRO stage for which no candidate fits into memory.

    The fields about memory describe the candidate that needs the least.
    """

    region: str
    candidates: int
    needed_bytes: float
    room: float
    parts: tuple[tuple[str, float], ...]
    """Largest terms of the needed memory."""

    def __str__(self) -> str:
        parts = ", ".join(f"{MEMORY_TERMS[name]} {size / GIB:.1f}" for name, size in self.parts)
        return f"needs {self.needed_bytes / GIB:.1f} of {self.room / GIB:.1f} GiB: {parts}"


@dataclass(frozen=True)
class Plan:
    """Result of a search: the fastest layouts that fit, and the reasons why others are excluded."""

    request: Request
    best: tuple[LayoutChoice, ...]
    """Fastest layout of each family, in the order of their seconds."""
    ties: int
    """Number of layouts of `best`, including the first, that may be the fastest.

    They differ by less than the uncertainty between two layouts of one model.
    """
    candidates: int
    """Number of candidates that were estimated."""
    fitting: int
    """Number of candidates that fit into memory."""
    excluded: tuple[Excluded, ...]
    """Regions that the rules exclude."""
    shortages: tuple[Shortage, ...]
    """Regions in which nothing fits."""


def plan(
    request: Request,
    *,
    fixed: Mapping[str, int] | None = None,
    calibration: Calibration | None = None,
    best: int = 5,
) -> Plan:
    """Search for the fastest layouts that fit into memory. See Note [Stages of a search].

    Args:
        request: Model, cluster and batch.
        fixed: Fields of the layout with fixed values (`techniques.parse_fixed`).
        calibration: Constants of this machine. None uses those of the package.
        best: Number of layouts to return.

    Raises:
        ConfigError: The rules leave no candidate.
        InputError: The device does not support the precision.
    """
    check(request)
    calibration = calibration or uncalibrated()
    rates = merged_rates(calibration)
    space = space_of(request, fixed)
    estimated = estimate_space(request, space, calibration)
    room = float(request.cluster.device.memory_bytes)
    shortages = _shortages(request, estimated, room, rates)
    chosen = _fastest(request, estimated, room, calibration, best)

    return Plan(
        request,
        tuple(chosen),
        ties(request, chosen, calibration),
        len(estimated.seconds),
        int((estimated.needed_bytes <= room).sum()),
        space.excluded,
        shortages,
    )


@dataclass(frozen=True)
class EstimatedSpace:
    """Candidates with predicted seconds and bytes."""

    layouts: Layouts
    seconds: NDArray[np.float64]
    needed_bytes: NDArray[np.float64]
    """Bytes of device memory. Infinite if the host memory does not suffice."""


def estimate_space(request: Request, space: Space, calibration: Calibration) -> EstimatedSpace:
    """Estimate all candidates of a space, and add candidates with some memory-saving options.

    See Note [Memory-saving options] in `plait.planner.techniques`.
    """
    rates = merged_rates(calibration)
    ends = _estimate(request, space.layouts, rates)
    sample = space.layouts.take(np.linspace(0, space.size - 1, min(space.size, 32), dtype=int))
    spreads = []
    for choice in choices_of(request, sample, calibration):
        spreads.append(log(choice.needed_high_bytes / choice.needed_bytes) / NINETY)

    # A margin for the uncertainty of the memory, which differs little between layouts.
    margin = NormalDist().inv_cdf(_FIT_PROBABILITY) * float(np.median(spreads))
    fits = ends.needed_bytes <= float(request.cluster.device.memory_bytes) * exp(-margin)
    more = space.between(ends.seconds, fits)
    proposed = space.proposed(fits)
    at_ends = EstimatedSpace(
        space.layouts.take(proposed), ends.seconds[proposed], ends.needed_bytes[proposed]
    )
    if more is None:
        return at_ends
    between = _estimate(request, more, rates)
    return EstimatedSpace(
        joined([at_ends.layouts, between.layouts]),
        np.concatenate([at_ends.seconds, between.seconds]),
        np.concatenate([at_ends.needed_bytes, between.needed_bytes]),
    )


def _estimate(request: Request, layouts: Layouts, rates: Rates) -> EstimatedSpace:
    size = np.size(layouts.tp)
    seconds = np.empty(size)
    needed_bytes = np.empty(size)
    for start in range(0, size, _CHUNK):
        part = slice(start, min(start + _CHUNK, size))
        job = job_of(request, layouts.take(part))
        # Few moments of a step are enough here: the chosen layouts are estimated again.
        states = states_of(request, job, every_moment=False)
        estimated = estimate(job, rates, states)
        seconds[part] = estimated.seconds
        # A layout whose states exceed the host memory does not fit on any device.
        host = np.maximum(states.first["host"], states.last["host"])
        needed_bytes[part] = np.where(
            host > _HOST_SHARE * request.cluster.device.host_memory_bytes,
            np.inf,
            estimated.memory.total,
        )

    return EstimatedSpace(layouts, seconds, needed_bytes)


def _fastest(
    request: Request, estimated: EstimatedSpace, room: float, calibration: Calibration, best: int
) -> list[LayoutChoice]:
    """Return the fastest layout of each family, at most `best` in total.

    Only layouts that are likely enough to fit into memory are considered.
    """
    order = np.flatnonzero(estimated.needed_bytes <= room)
    # Equally fast candidates keep the order of the space, so that plans are reproducible.
    order = order[np.argsort(estimated.seconds[order], kind="stable")]
    chosen: list[LayoutChoice] = []
    seen: set[tuple[Any, ...]] = set()
    families: Counter[tuple[Any, ...]] = Counter()
    # The simulation changes the order of the best, so more are simulated than returned.
    enough_families = max(best + 1, 6)
    enough_choices = min(max(2 * best, 12), _MAX_SIMULATED)

    for start in range(0, len(order), 256):
        layouts = estimated.layouts.take(order[start : start + 256])
        for choice in choices_of(request, layouts, calibration):
            family = _family(choice)
            kind = (*family, choice.layout["schedule"], choice.layout["vpp"])
            # Layouts of similar speed are often of the same family.
            if kind in seen or families[family] >= _MAX_PER_FAMILY:
                continue
            if choice.fit_probability < _FIT_PROBABILITY:
                continue
            seen.add(kind)
            families[family] += 1
            chosen.append(choice)
            if len(families) == enough_families or len(chosen) == enough_choices:
                return _of_families(simulate_pipelines(request, chosen, calibration))[:best]

        # Few kinds of layouts fit: the rest of a long list is not worth its time.
        if start >= 4096 and chosen:
            break

    return _of_families(simulate_pipelines(request, chosen, calibration))[:best]


def _family(choice: LayoutChoice) -> tuple[Any, ...]:
    return tuple(choice.layout[name] for name in FAMILY)


def _of_families(choices: Sequence[LayoutChoice]) -> list[LayoutChoice]:
    """Return the first choice of every family."""
    first: dict[tuple[Any, ...], LayoutChoice] = {}
    for choice in choices:
        first.setdefault(_family(choice), choice)
    return list(first.values())


def _shortages(
    request: Request, estimated: EstimatedSpace, room: float, rates: Rates
) -> tuple[Shortage, ...]:
    """Return a `Shortage` for every (tp, pp, stage) for which no candidate fits into memory."""
    layouts = estimated.layouts
    needed_bytes = estimated.needed_bytes
    # One integer per (tp, pp, stage): there are four ZeRO stages, and pp is far below 4096.
    key = (np.asarray(layouts.tp) * 4096 + np.asarray(layouts.pp)) * 4 + np.asarray(layouts.stage)
    order = np.lexsort((needed_bytes, key))
    # The first candidate of each key needs the least memory.
    firsts = order[np.concatenate([[True], np.diff(key[order]) != 0])]
    smallest = firsts[(needed_bytes[firsts] > room) & np.isfinite(needed_bytes[firsts])]
    if not len(smallest):
        return ()
    counts = dict(zip(*np.unique(key, return_counts=True), strict=True))
    job = job_of(request, layouts.take(smallest))
    memory = memory_bytes(job, rates, states_of(request, job))

    shortages = []
    for position, index in enumerate(smallest):
        terms = [
            (name, float(np.broadcast_to(value, len(smallest))[position]))
            for name, value in memory.terms.items()
        ]
        terms.sort(key=lambda term: -term[1])
        layout = layouts.as_dict(int(index))
        pipeline = f" pp={layout['pp']}" if request.techniques.pipeline else ""
        shortages.append(
            Shortage(
                f"tp={layout['tp']}{pipeline} stage={layout['stage']}",
                int(counts[key[index]]),
                float(needed_bytes[index]),
                room,
                tuple(terms[:3]),
            )
        )

    return tuple(shortages)
