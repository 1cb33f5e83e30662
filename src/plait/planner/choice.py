"""One layout with what it is predicted to cost, and how far two of them can be told apart."""

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
    merged,
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

_TIE = 0.25
_LAYOUT_SPREAD = 0.04
"""See `ties`; the noise of one layout of a model on one machine, as a logarithm
(`calibrate.calibrate`'s).
"""
NINETY = 1.645
"""Standard deviations on either side of a 90 % interval."""


@dataclass(frozen=True)
class Choice:
    """One layout with what it is predicted to cost. Seconds and bytes; intervals are of 90 %."""

    layout: Mapping[str, Any]
    seconds: float
    seconds_low: float
    seconds_high: float
    tokens_per_second: float
    mfu: float
    """Share of the devices' peak in the computation's precision; model FLOPs, causal attention
    counted by half, no recomputation.
    """
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
    def budget(self) -> float | None:
        """Bytes that activations take at the peak, where what recomputes is solved from that; else
        None.
        """
        if RECOMPUTE[int(self.layout["recompute"])] != "budget":
            return None
        return sum(self.memory_terms[name] for name in ("activations", "working", "logits"))

    @property
    def schedule(self) -> str:
        """Its name."""
        return SCHEDULES[int(self.layout["schedule"])]


def layouts_of(choice: Choice) -> Layouts:
    """A choice as the one candidate of what is priced."""
    return Layouts.of([choice.layout])


def price(
    request: Request,
    layouts: Sequence[Mapping[str, Any]],
    *,
    calibration: Calibration | None = None,
) -> list[Choice]:
    """What given layouts cost, fitting or not."""
    check(request)
    return choices_of(request, Layouts.of(layouts), calibration or uncalibrated())


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


def choices_of(request: Request, layouts: Layouts, calibration: Calibration) -> list[Choice]:
    """The same of candidates as arrays."""
    rates = merged(calibration)
    job = job_of(request, layouts)
    states = states_of(request, job)
    found = estimate(job, rates, states)
    count = np.size(layouts.tp)
    everywhere = _one_entry_each(job, count)
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

    memory = found.memory
    moment = np.broadcast_to(found.memory.moment, (count,))
    terms = {name: each(value) for name, value in found.step.terms.items()}
    memory_terms = {name: each(value) for name, value in memory.terms.items()}
    seconds, total, allocated, reserved = map(
        each, (found.seconds, memory.total, memory.allocated, memory.reserved)
    )
    return [
        Choice(
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


def _one_entry_each(job: Job, count: int) -> Job:
    """Everything with one entry a candidate."""
    return job.mapped(lambda value: np.broadcast_to(np.asarray(value), (count,)), job.layouts)


def ties(request: Request, choices: Sequence[Choice], calibration: Calibration) -> int:
    """How many of the first are faster than the first with a probability of at least _TIE: what is
    uncertain in both, such as the share of the peak that products reach, does not tell them apart.
    """
    if not choices:
        return 0
    job = _one_entry_each(
        job_of(request, Layouts.of([choice.layout for choice in choices])), len(choices)
    )
    derivative = sensitivity(time_of(job), calibration.time, relevant(calibration.time.names, job))
    apart = derivative - derivative[0]
    spread = np.sqrt(
        np.einsum("ij,jk,ik->i", apart, calibration.time.covariance, apart) + 2 * _LAYOUT_SPREAD**2
    )
    slower = np.log([choice.seconds / choices[0].seconds for choice in choices])
    tied = slower <= -NormalDist().inv_cdf(_TIE) * spread
    return int(np.argmin(tied)) if not tied.all() else len(choices)
