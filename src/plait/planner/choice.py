"""Layouts with their predicted costs, and which of them are equally fast within the uncertainty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import erf, sqrt
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
from plait.planner.estimate import estimate
from plait.planner.job import RECOMPUTE, SCHEDULES, Job, Layouts
from plait.planner.memory import MOMENTS
from plait.planner.memory import TERMS as MEMORY_TERMS
from plait.planner.request import Request, check, job_of, states_of
from plait.planner.simulate import simulated_terms
from plait.planner.step import TERMS

_TIE_PROBABILITY = 0.25
"""Probability of being the fastest from which on a layout ties with the first one."""
_LAYOUT_SPREAD = 0.04
"""Noise of one layout of a model on one machine, as a logarithm, as in `calibrate.calibrate`."""
NINETY = 1.645
"""Standard deviations on either side of a 90 % interval."""


@dataclass(frozen=True)
class LayoutChoice:
    """Layout with its predicted cost in seconds and bytes. Intervals are 90 % intervals."""

    layout: Mapping[str, Any]
    seconds: float
    seconds_low: float
    seconds_high: float
    tokens_per_second: float
    mfu: float
    """Model FLOPs utilization in the precision of the computation.

    Causal attention counts by half, recomputation does not count.
    """
    terms: Mapping[str, float]
    allocated: float
    reserved: float
    needed: float
    """Bytes with the device's context."""
    needed_high: float
    fit_probability: float
    memory_terms: Mapping[str, float]
    moment: str

    @property
    def budget(self) -> float | None:
        """Bytes of activations at the peak if recomputation follows a budget, else None."""
        if RECOMPUTE[int(self.layout["recompute"])] != "budget":
            return None
        return sum(self.memory_terms[name] for name in ("activations", "working", "logits"))

    @property
    def schedule(self) -> str:
        """Name of the pipeline schedule."""
        return SCHEDULES[int(self.layout["schedule"])]


def layouts_of(choice: LayoutChoice) -> Layouts:
    """Return a choice as arrays with one candidate."""
    return Layouts.of([choice.layout])


def price(
    request: Request,
    layouts: Sequence[Mapping[str, Any]],
    *,
    calibration: Calibration | None = None,
) -> list[LayoutChoice]:
    """Predict the cost of given layouts, whether they fit or not.

    Args:
        request: Model, cluster and batch.
        layouts: Fields of `Layouts` as plain numbers.
        calibration: Constants of this machine. None uses the shipped constants.
    """
    check(request)
    return choices_of(request, Layouts.of(layouts), calibration or uncalibrated())


def simulate_pipelines(
    request: Request, choices: list[LayoutChoice], calibration: Calibration
) -> list[LayoutChoice]:
    """Return choices with their pipelines simulated by the schedule's table, fastest first."""
    rates = merged_rates(calibration)
    refined = []
    for choice in choices:
        terms = simulated_terms(job_of(request, layouts_of(choice)), rates, choice.terms)
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
    """Predict the cost of candidates in arrays. See `price`."""
    rates = merged_rates(calibration)
    job = job_of(request, layouts)
    states = states_of(request, job)
    estimated = estimate(job, rates, states)
    count = np.size(layouts.tp)
    everywhere = _broadcast_job(job, count)
    time_spread = deviation(time_of(everywhere), calibration.time, everywhere)
    memory_spread = deviation(
        memory_of(everywhere, ["total"] * count), calibration.memory, everywhere
    )
    model = request.model.architecture
    tokens = request.global_batch * request.sequence
    flops = float(model.model_flops(request.sequence)) * tokens
    peak = float(request.cluster.device.flops[request.precision]) * request.cluster.devices
    room = float(request.cluster.device.memory_bytes)

    def each(value: Any) -> NDArray[np.float64]:
        return np.broadcast_to(np.asarray(value, float), (count,))

    memory = estimated.memory
    moment = np.broadcast_to(estimated.memory.moment, (count,))
    terms = {name: each(value) for name, value in estimated.step.terms.items()}
    memory_terms = {name: each(value) for name, value in memory.terms.items()}
    seconds, total, allocated, reserved = map(
        each, (estimated.seconds, memory.total, memory.allocated, memory.reserved)
    )

    return [
        LayoutChoice(
            layout=layouts.at(i),
            seconds=float(seconds[i]),
            seconds_low=float(seconds[i] * np.exp(-NINETY * time_spread[i])),
            seconds_high=float(seconds[i] * np.exp(NINETY * time_spread[i])),
            tokens_per_second=tokens / float(seconds[i]),
            mfu=flops / peak / float(seconds[i]),
            terms={name: float(terms[name][i]) for name in TERMS},
            allocated=float(allocated[i]),
            reserved=float(reserved[i]),
            needed=float(total[i]),
            needed_high=float(total[i] * np.exp(NINETY * memory_spread[i])),
            fit_probability=0.5
            * (1 + erf(float((np.log(room) - np.log(total[i])) / memory_spread[i]) / sqrt(2))),
            memory_terms={name: float(memory_terms[name][i]) for name in MEMORY_TERMS},
            moment=MOMENTS[int(moment[i])],
        )
        for i in range(count)
    ]


def _broadcast_job(job: Job, count: int) -> Job:
    """Return a job in which every number has one entry per candidate."""
    return job.mapped(lambda value: np.broadcast_to(np.asarray(value), (count,)), job.layouts)


def ties(request: Request, choices: Sequence[LayoutChoice], calibration: Calibration) -> int:
    """Return how many of the first choices may be as fast as the first one.

    A choice ties if it is faster with a probability of at least `_TIE_PROBABILITY`. Uncertainty
    that two layouts share, such as that of the speed of matrix products, does not separate them.
    """
    if not choices:
        return 0
    job = _broadcast_job(
        job_of(request, Layouts.of([choice.layout for choice in choices])), len(choices)
    )
    derivative = sensitivity(time_of(job), calibration.time, relevant(calibration.time.names, job))
    difference = derivative - derivative[0]
    spread = np.sqrt(
        np.einsum("ij,jk,ik->i", difference, calibration.time.covariance, difference)
        + 2 * _LAYOUT_SPREAD**2
    )
    slower = np.log([choice.seconds / choices[0].seconds for choice in choices])
    tied = slower <= -NormalDist().inv_cdf(_TIE_PROBABILITY) * spread
    if tied.all():
        return len(choices)
    return int(np.argmin(tied))
