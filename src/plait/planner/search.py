"""Search over all candidate layouts: price each one, drop those that do not fit, rank the others.

`plan` is the entry point, for commands and for "auto" in a configuration. Nothing here prints or
writes.

Note [Stages of a search]
    1. `space_of` creates all candidates that the rules allow, at both ends of Note [Relief] in
       `plait.planner.relief`.
    2. `price_space` prices them with closed formulas, at a few moments of a step, and adds
       candidates between the ends where they matter.
    3. `_fastest` takes the fastest candidates that fit, prices them again at all moments and with
       intervals, and keeps a few per family of layouts.
    4. `simulate_pipelines` simulates the pipelines of these, and they are sorted by the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.planner.calibrate import Calibration, merged_rates, uncalibrated
from plait.planner.choice import NINETY, LayoutChoice, choices_of, simulate_pipelines, ties
from plait.planner.constants import Rates
from plait.planner.estimate import estimate
from plait.planner.job import Layouts
from plait.planner.memory import TERMS as MEMORY_TERMS
from plait.planner.request import Request, check, estimate_of, job_of, space_of, states_of
from plait.planner.space import Excluded, Space, joined
from plait.units import GIB

_CHUNK = 1 << 15
"""Candidates that are priced at a time, so that arrays stay in the cache."""
_FIT_PROBABILITY = 0.9
"""Probability of fitting into memory that a plan must have."""
_MAX_SIMULATED = 50
"""Largest number of layouts that are simulated. Usually twice the requested number."""
FAMILY = ("tp", "pp", "cp", "ep", "stage")
"""Fields that define a family of layouts. A plan shows the fastest layout of each family."""
_MAX_PER_FAMILY = 3
"""Layouts per family that are simulated."""
_HOST_SHARE = 0.8
"""Share of a node's memory that states may use."""


@dataclass(frozen=True)
class Shortage:
    """Region of the space in which nothing fits, and what its smallest candidate needs."""

    region: str
    candidates: int
    needed: float
    room: float
    parts: tuple[tuple[str, float], ...]
    """Largest terms of the needed memory."""

    def __str__(self) -> str:
        parts = ", ".join(f"{MEMORY_TERMS[name]} {size / GIB:.1f}" for name, size in self.parts)
        return f"needs {self.needed / GIB:.1f} of {self.room / GIB:.1f} GiB: {parts}"


@dataclass(frozen=True)
class Plan:
    """Result of a search."""

    request: Request
    best: tuple[LayoutChoice, ...]
    """Layouts from fast to slow; the fastest of each family."""
    ties: int
    """Number of these, including the first, that may be the fastest.

    Their difference is smaller than the uncertainty between two layouts of one model.
    """
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
    """Search for the fastest layouts that fit into memory. See Note [Stages of a search].

    Args:
        request: Model, cluster and batch.
        fixed: Fields of the layout with fixed values (`fixed.parse_fixed`).
        calibration: Constants of this machine. None uses those that ship.
        best: Number of layouts to return.

    Raises:
        ConfigError: The rules leave no candidate.
        InputError: The device does not support the precision.
    """
    check(request)
    calibration = calibration or uncalibrated()
    rates = merged_rates(calibration)
    space = space_of(request, fixed)
    priced = price_space(request, space, calibration)
    room = float(request.cluster.device.memory_bytes)
    shortages = _shortages(request, priced, room, rates)
    chosen = _fastest(request, priced, room, calibration, best)

    return Plan(
        request,
        tuple(chosen),
        ties(request, chosen, calibration),
        len(priced.seconds),
        int((priced.needed <= room).sum()),
        space.excluded,
        shortages,
    )


@dataclass(frozen=True)
class PricedSpace:
    """Candidates with predicted seconds and bytes."""

    layouts: Layouts
    seconds: NDArray[np.float64]
    needed: NDArray[np.float64]
    """Bytes; infinite if the host memory does not suffice."""


def price_space(request: Request, space: Space, calibration: Calibration) -> PricedSpace:
    """Price all candidates, including those between the ends of Note [Relief]."""
    rates = merged_rates(calibration)
    ends = _priced(request, space.layouts, rates)
    sample = space.layouts.take(np.linspace(0, space.size - 1, min(space.size, 32), dtype=int))
    spreads = [
        log(choice.needed_high / choice.needed) / NINETY
        for choice in choices_of(request, sample, calibration)
    ]

    # A margin for the uncertainty of the memory, which differs little between layouts.
    margin = np.median(spreads)
    quantile = NormalDist().inv_cdf(_FIT_PROBABILITY)
    threshold = float(request.cluster.device.memory_bytes) * exp(-quantile * float(margin))
    fits = ends.needed <= threshold
    more = space.between(ends.seconds, fits)
    proposed = space.proposed(fits)
    parts = [
        PricedSpace(space.layouts.take(proposed), ends.seconds[proposed], ends.needed[proposed])
    ]
    if more is not None:
        parts.append(_priced(request, more, rates))

    return PricedSpace(
        joined([part.layouts for part in parts]),
        np.concatenate([part.seconds for part in parts]),
        np.concatenate([part.needed for part in parts]),
    )


def _priced(request: Request, layouts: Layouts, rates: Rates) -> PricedSpace:
    size = np.size(layouts.tp)
    seconds = np.empty(size)
    needed = np.empty(size)
    for start in range(0, size, _CHUNK):
        part = slice(start, min(start + _CHUNK, size))
        job = job_of(request, layouts.take(part))
        # Few moments of a step are enough here: the chosen layouts are priced again.
        states = states_of(request, job, every_moment=False)
        estimated = estimate(job, rates, states)
        seconds[part] = estimated.seconds
        # A layout whose states exceed the host memory does not fit on any device.
        host = np.maximum(states.first["host"], states.last["host"])
        needed[part] = np.where(
            host > _HOST_SHARE * request.cluster.device.host_memory_bytes,
            np.inf,
            estimated.memory.total,
        )

    return PricedSpace(layouts, seconds, needed)


def _fastest(
    request: Request, priced: PricedSpace, room: float, calibration: Calibration, best: int
) -> list[LayoutChoice]:
    """Return the fastest layouts of each family that fit with enough probability."""
    order = np.flatnonzero(priced.needed <= room)
    order = order[np.argsort(priced.seconds[order], kind="stable")]
    chosen: list[LayoutChoice] = []
    seen: set[tuple[Any, ...]] = set()
    families: Counter[tuple[Any, ...]] = Counter()
    # The simulation changes the order of the best, so more are simulated than returned.
    enough_families = max(best + 1, 6)
    enough_choices = min(max(2 * best, 12), _MAX_SIMULATED)

    for start in range(0, len(order), 256):
        layouts = priced.layouts.take(order[start : start + 256])
        for choice in choices_of(request, layouts, calibration):
            family = _family(choice)
            kind = (*family, choice.layout["schedule"], choice.layout["vpp"])
            # The next layouts are often near twins of the last one.
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
    request: Request, priced: PricedSpace, room: float, rates: Rates
) -> tuple[Shortage, ...]:
    """Return the smallest candidate of every (tp, pp, stage) of which nothing fits."""
    layouts = priced.layouts
    needed = priced.needed
    key = (np.asarray(layouts.tp) * 4096 + np.asarray(layouts.pp)) * 4 + np.asarray(layouts.stage)
    order = np.lexsort((needed, key))
    firsts = order[np.concatenate([[True], np.diff(key[order]) != 0])]
    smallest = firsts[(needed[firsts] > room) & np.isfinite(needed[firsts])]
    if not len(smallest):
        return ()
    counts = dict(zip(*np.unique(key, return_counts=True), strict=True))
    memory = estimate_of(request, layouts.take(smallest), rates).memory

    shortages = []
    for position, index in enumerate(smallest):
        terms = [
            (name, float(np.broadcast_to(value, len(smallest))[position]))
            for name, value in memory.terms.items()
        ]
        terms.sort(key=lambda term: -term[1])
        layout = layouts.at(int(index))
        pipeline = f" pp={layout['pp']}" if request.offers.pipeline else ""
        shortages.append(
            Shortage(
                f"tp={layout['tp']}{pipeline} stage={layout['stage']}",
                int(counts[key[index]]),
                float(needed[index]),
                room,
                tuple(terms[:3]),
            )
        )

    return tuple(shortages)
