"""Details of a plan for reports: memory of pipeline ranks, timeline, and a sample of candidates.

The closed forms are those of the search; this module only asks for more of their terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.parallel.schedules.timeline import Timeline
from plait.planner.calibrate import Calibration, merged_rates, uncalibrated
from plait.planner.choice import LayoutChoice, layouts_of
from plait.planner.estimate import lower_end
from plait.planner.hardware import only
from plait.planner.memory import MOMENTS, TERMS, memory_bytes
from plait.planner.request import Request, estimate_of, job_of, space_of, states_of
from plait.planner.search import price_space
from plait.planner.simulate import RANK_TERMS, timeline_of
from plait.planner.step import TERMS as TERM_MEANINGS

COSTS = {
    "recompute": ("recompute",),
    "launches": ("host",),
    "tensor traffic": ("tp",),
    "data traffic": ("dp", "contention"),
    "pipeline": ("idle", "p2p"),
    "optimizer": ("optimizer", "offload"),
    "other": ("cp", "ep", "accumulate", "stragglers", "fixed"),
}
"""Terms of `step.TERMS` by group: parts of a step besides the computation of the model itself."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one pipeline rank at its peak."""

    rank: str
    """Description of the rank."""
    moment: str
    terms: Mapping[str, float]
    """Bytes by `memory.TERMS`, then `slack` (reserved, not allocated) and `context`."""
    needed: float
    """Sum of the terms."""
    needed_low: float
    needed_high: float
    """Upper end of the 90 % interval."""


def rank_memory(
    request: Request, choice: LayoutChoice, *, calibration: Calibration | None = None
) -> tuple[RankMemory, ...]:
    """Return the memory of every pipeline rank. The fullest one has the choice's own figure."""
    rates = merged_rates(calibration or uncalibrated())
    job = job_of(request, layouts_of(choice))
    pp = int(choice.layout["pp"])
    spread = choice.needed_high / choice.needed

    def priced(rank: int) -> RankMemory:
        kind = "inner"
        if rank == 0:
            kind = "first"
        elif rank == pp - 1:
            kind = "last"
        memory = memory_bytes(job, rates, states_of(request, job, inner=rank), ranks=(kind,))
        terms = {name: only(memory.terms[name]) for name in TERMS} | {
            "slack": only(memory.slack),
            "context": only(memory.context),
        }
        needed = sum(terms.values())
        title = f"rank {rank}" if pp > 1 else "every rank"

        return RankMemory(
            title,
            MOMENTS[int(only(memory.moment))],
            terms,
            needed,
            lower_end(needed, needed * spread),
            needed * spread,
        )

    return tuple(priced(rank) for rank in range(pp))


def timeline(
    request: Request, choice: LayoutChoice, *, calibration: Calibration | None = None
) -> Timeline:
    """Return the simulated timeline of a choice.

    Raises:
        InputError: The schedule has no table that can be simulated.
    """
    return timeline_of(
        job_of(request, layouts_of(choice)), merged_rates(calibration or uncalibrated())
    )


def terms_outside_pipeline(choice: LayoutChoice, walked: Timeline) -> dict[str, float]:
    """Return the seconds of a step outside of the simulated pipeline, keyed by description.

    Together with the total of the timeline they sum to the seconds of the step.
    """
    others = {
        TERM_MEANINGS[name]: size
        for name, size in choice.terms.items()
        if name not in (*RANK_TERMS, "idle") and size > 0
    }

    # The closed form spreads the layers evenly; the simulation cuts them as the engine does, and
    # gives the stage with the head fewer.
    missing = choice.seconds - walked.total - sum(others.values())
    if missing > 1e-9 * choice.seconds:
        others["layers that the closed form leaves on the slowest stage"] = missing
    return others


@dataclass(frozen=True)
class Point:
    """Candidate layout in a `Sample`, with its predicted time and memory."""

    layout: Mapping[str, Any]
    seconds: float
    """Seconds by the closed form."""
    needed: float
    fits: bool
    cost: str
    """Largest group of COSTS."""
    cost_share: float
    """Share of the step."""


@dataclass(frozen=True)
class Sample:
    """Fastest candidate of every cell of a grid over memory and step time."""

    points: tuple[Point, ...]
    candidates: int
    outside: int
    """Candidates that need more memory or time than the grid spans."""


_COLUMNS = 80
_ROWS = 32
_WIDEST = 2.5
_SLOWEST = 30.0
"""Ends of the grid, as multiples of the device's memory and of the fastest candidate's step."""


def sample(
    request: Request,
    *,
    fixed: Mapping[str, int] | None = None,
    calibration: Calibration | None = None,
) -> Sample:
    """Return at most `_COLUMNS` x `_ROWS` candidates, spread over memory and step time."""
    calibration = calibration or uncalibrated()
    rates = merged_rates(calibration)
    space = space_of(request, fixed)
    priced = price_space(request, space, calibration)
    seconds = priced.seconds
    needed = priced.needed
    available = float(request.cluster.device.memory_bytes)
    depth = np.log(seconds / seconds.min()) / np.log(_SLOWEST)
    inside = np.flatnonzero((needed < _WIDEST * available) & (depth < 1))
    cell = np.floor(needed[inside] / (_WIDEST * available) * _COLUMNS) * _ROWS + np.floor(
        depth[inside] * _ROWS
    )
    if not len(inside):
        return Sample((), len(seconds), len(seconds))

    # A cell has either candidates that fit or candidates that do not.
    cell = cell * 2 + (needed[inside] <= available)
    order = np.lexsort((seconds[inside], cell))
    is_first_of_cell = np.concatenate([[True], np.diff(cell[order]) != 0])
    chosen = inside[order[is_first_of_cell]]
    at = priced.layouts.take(chosen)
    terms = estimate_of(request, at, rates).step.terms

    def sum_of_terms(names: tuple[str, ...]) -> Any:
        return sum(np.broadcast_to(terms[name], len(chosen)) for name in names)

    groups = np.stack([sum_of_terms(names) for names in COSTS.values()])
    largest = groups.argmax(axis=0)
    names = list(COSTS)
    points = tuple(
        Point(
            at.at(i),
            float(seconds[index]),
            float(needed[index]),
            bool(needed[index] <= available),
            names[largest[i]],
            float(groups[largest[i], i] / seconds[index]),
        )
        for i, index in enumerate(chosen)
    )
    return Sample(points, len(seconds), len(seconds) - len(inside))
