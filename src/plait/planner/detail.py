"""What a report shows of a plan beyond the search's own figures: the bytes of every pipeline rank,
the simulation of its table, and a sample of all candidates with the largest cost of each.

Nothing is predicted anew: the same closed forms as in the search, asked for more of their terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.parallel.schedules.timeline import Timeline
from plait.planner.calibrate import Calibration, merged, uncalibrated
from plait.planner.choice import Choice, layouts_of
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
"""The parts of a step besides the computation of the model itself: a group to its terms of
`step.TERMS`.
"""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one pipeline rank at its peak."""

    rank: str
    """Its description."""
    moment: str
    terms: Mapping[str, float]
    """By `memory.TERMS`, then `slack` (reserved and not allocated) and `context` (outside the
    allocator).
    """
    needed: float
    """Their sum."""
    needed_low: float
    needed_high: float
    """The 90 % interval."""


def rank_memory(
    request: Request, choice: Choice, *, calibration: Calibration | None = None
) -> tuple[RankMemory, ...]:
    """Every pipeline rank of a choice, the first first. The one that allocates most is the choice's
    own figure.
    """
    rates = merged(calibration or uncalibrated())
    job = job_of(request, layouts_of(choice))
    pp = int(choice.layout["pp"])
    spread = choice.needed_high / choice.needed

    def priced(rank: int) -> RankMemory:
        which = "first" if rank == 0 else "last" if rank == pp - 1 else "inner"
        found = memory_bytes(job, rates, states_of(request, job, inner=rank), ranks=(which,))
        terms = {name: only(found.terms[name]) for name in TERMS} | {
            "slack": only(found.slack),
            "context": only(found.context),
        }
        needed = sum(terms.values())
        title = f"rank {rank}" if pp > 1 else "every rank"
        return RankMemory(
            title,
            MOMENTS[int(only(found.moment))],
            terms,
            needed,
            lower_end(needed, needed * spread),
            needed * spread,
        )

    return tuple(priced(rank) for rank in range(pp))


def timeline(
    request: Request, choice: Choice, *, calibration: Calibration | None = None
) -> Timeline:
    """When every computation of a choice runs. Raises InputError where its schedule has no table
    that can be simulated.
    """
    return timeline_of(job_of(request, layouts_of(choice)), merged(calibration or uncalibrated()))


def beyond(choice: Choice, walked: Timeline) -> dict[str, float]:
    """Seconds of a choice's step that are not in the simulation of its pipeline, by meaning;
    together they are the step.
    """
    rest = {
        TERM_MEANINGS[name]: size
        for name, size in choice.terms.items()
        if name not in (*RANK_TERMS, "idle") and size > 0
    }
    # The closed form spreads the layers evenly; the simulation cuts them as the engine does, and
    # gives the stage with the head fewer.
    missing = choice.seconds - walked.total - sum(rest.values())
    return rest | (
        {"layers that the closed form leaves on the slowest stage": missing}
        if missing > 1e-9 * choice.seconds
        else {}
    )


@dataclass(frozen=True)
class Point:
    """One candidate of the sample."""

    layout: Mapping[str, Any]
    seconds: float
    """By the closed form."""
    needed: float
    fits: bool
    cost: str
    """The largest of COSTS."""
    cost_share: float
    """Of the step."""


@dataclass(frozen=True)
class Sample:
    """The fastest candidate of every cell of a grid over memory and step time."""

    points: tuple[Point, ...]
    candidates: int
    outside: int
    """Candidates that need more memory or time than the grid spans."""


_COLUMNS = 80
_ROWS = 32
_WIDEST = 2.5
_SLOWEST = 30.0
"""The grid ends at so many times the device's memory, and so many times the fastest candidate's
step.
"""


def sample(
    request: Request,
    *,
    fixed: Mapping[str, int] | None = None,
    calibration: Calibration | None = None,
) -> Sample:
    """At most `_COLUMNS` x `_ROWS` of all candidates, spread over what they cost."""
    calibration = calibration or uncalibrated()
    rates = merged(calibration)
    space = space_of(request, fixed)
    priced = price_space(request, space, calibration)
    seconds = priced.seconds
    needed = priced.needed
    room = float(request.cluster.device.memory_bytes)
    depth = np.log(seconds / seconds.min()) / np.log(_SLOWEST)
    inside = np.flatnonzero((needed < _WIDEST * room) & (depth < 1))
    cell = np.floor(needed[inside] / (_WIDEST * room) * _COLUMNS) * _ROWS + np.floor(
        depth[inside] * _ROWS
    )
    cell = cell * 2 + (needed[inside] <= room)  # the limit never cuts a cell
    order = np.lexsort((seconds[inside], cell))
    chosen = (
        inside[order[np.concatenate([[True], np.diff(cell[order]) != 0])]]
        if len(inside)
        else inside
    )
    if not len(chosen):
        return Sample((), len(seconds), len(seconds))
    at = priced.layouts.take(chosen)
    terms = estimate_of(request, at, rates).step.terms
    groups = np.stack(
        [
            sum(np.broadcast_to(terms[name], len(chosen)) for name in names)
            for names in COSTS.values()
        ]
    )
    largest = groups.argmax(axis=0)
    names = list(COSTS)
    points = tuple(
        Point(
            at.at(i),
            float(seconds[index]),
            float(needed[index]),
            bool(needed[index] <= room),
            names[largest[i]],
            float(groups[largest[i], i] / seconds[index]),
        )
        for i, index in enumerate(chosen)
    )
    return Sample(points, len(seconds), len(seconds) - len(inside))
