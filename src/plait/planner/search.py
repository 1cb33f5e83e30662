"""The search: every candidate layout priced in closed form, those that do not fit told apart by
what they lack, the fastest kept.

`plan` is the one function to call, from a command or from whatever meets "auto" in a configuration.
Nothing here prints or writes.
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

from plait.planner.calibrate import Calibration, merged, uncalibrated
from plait.planner.choice import NINETY, Choice, choices_of, ties, walked
from plait.planner.constants import Rates
from plait.planner.estimate import estimate
from plait.planner.job import Layouts
from plait.planner.memory import TERMS as MEMORY_TERMS
from plait.planner.request import Request, check, estimate_of, job_of, space_of, states_of
from plait.planner.space import Excluded, Space, joined
from plait.units import GIB

_CHUNK = 1 << 15
"""Candidates priced at a time, so that arrays stay in the cache."""
_CERTAIN = 0.9
"""A plan fits with at least this probability."""
_MOST_SIMULATED = 50
"""So many of the best are simulated by their schedule's table, and twice as many as are asked for.
"""
FAMILY = ("tp", "pp", "cp", "ep", "stage")
"""Fields of a layout; those that differ in others alone are near twins, of which a plan shows the
fastest.
"""
_MOST_OF_FAMILY = 3
"""So many of each are simulated."""
_HOST_SHARE = 0.8
"""Of a node's memory, what states may take."""


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
    """Fastest first; of layouts that agree in FAMILY the fastest."""
    ties: int
    """How many of these, the first included, may as well be the fastest: the difference is less
    than what two layouts of one model are known to.
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
    """Search. `fixed` are fields of a layout that must have a value (`fixed.parse_fixed`),
    `calibration` constants of this machine.

    Raises ConfigError where the rules leave no candidate, InputError where the device cannot
    compute so.
    """
    check(request)
    calibration = calibration or uncalibrated()
    rates = merged(calibration)
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
class Priced:
    """Candidates with what they cost."""

    layouts: Layouts
    seconds: NDArray[np.float64]
    needed: NDArray[np.float64]
    """Bytes; of what the host cannot hold infinitely many."""


def price_space(request: Request, space: Space, calibration: Calibration) -> Priced:
    """Every candidate, and what lies between those that fit with enough certainty and those that do
    not.
    """
    rates = merged(calibration)
    found = _priced(request, space.layouts, rates)
    some = space.layouts.take(np.linspace(0, space.size - 1, min(space.size, 32), dtype=int))
    margin = np.median(
        [
            log(choice.needed_high / choice.needed) / NINETY
            for choice in choices_of(request, some, calibration)
        ]
    )
    room = float(request.cluster.device.memory_bytes) * exp(
        -NormalDist().inv_cdf(_CERTAIN) * float(margin)
    )
    fits = found.needed <= room
    more = space.between(found.seconds, fits)
    kept = space.proposed(fits)
    parts = [Priced(space.layouts.take(kept), found.seconds[kept], found.needed[kept])]
    parts += [_priced(request, more, rates)] if more is not None else []
    return Priced(
        joined([part.layouts for part in parts]),
        np.concatenate([part.seconds for part in parts]),
        np.concatenate([part.needed for part in parts]),
    )


def _priced(request: Request, layouts: Layouts, rates: Rates) -> Priced:
    size = np.size(layouts.tp)
    seconds = np.empty(size)
    needed = np.empty(size)
    for start in range(0, size, _CHUNK):
        part = slice(start, min(start + _CHUNK, size))
        job = job_of(request, layouts.take(part))
        # those that are chosen are priced again
        states = states_of(request, job, every_moment=False)
        found = estimate(job, rates, states)
        seconds[part] = found.seconds
        # What the host cannot hold does not fit either, whatever the device has.
        host = np.maximum(states.first["host"], states.last["host"])
        needed[part] = np.where(
            host > _HOST_SHARE * request.cluster.device.host_memory_bytes,
            np.inf,
            found.memory.total,
        )
    return Priced(layouts, seconds, needed)


def _fastest(
    request: Request, priced: Priced, room: float, calibration: Calibration, best: int
) -> list[Choice]:
    """The fastest of every kind of layout that fit with enough certainty."""
    order = np.flatnonzero(priced.needed <= room)
    order = order[np.argsort(priced.seconds[order], kind="stable")]
    found: list[Choice] = []
    seen: set[tuple[Any, ...]] = set()
    families: Counter[tuple[Any, ...]] = Counter()
    for start in range(0, len(order), 256):
        for choice in choices_of(
            request, priced.layouts.take(order[start : start + 256]), calibration
        ):
            family = _family(choice)
            kind = (*family, choice.layout["schedule"], choice.layout["vpp"])
            if (
                choice.fit_probability >= _CERTAIN
                and kind not in seen
                and families[family] < _MOST_OF_FAMILY
            ):
                seen.add(kind)
                families[family] += 1
                found.append(choice)
                if len(families) == max(best + 1, 6) or len(found) == min(
                    max(2 * best, 12), _MOST_SIMULATED
                ):
                    return _of_families(walked(request, found, calibration))[:best]
        if start >= 4096 and found:
            break
    return _of_families(walked(request, found, calibration))[:best]


def _family(choice: Choice) -> tuple[Any, ...]:
    return tuple(choice.layout[name] for name in FAMILY)


def _of_families(choices: Sequence[Choice]) -> list[Choice]:
    """The first of every family."""
    first: dict[tuple[Any, ...], Choice] = {}
    for choice in choices:
        first.setdefault(_family(choice), choice)
    return list(first.values())


def _shortages(request: Request, priced: Priced, room: float, rates: Rates) -> tuple[Shortage, ...]:
    """For every (tp, pp, stage) of which nothing fits: what the smallest of it needs."""
    at = priced.layouts
    needed = priced.needed
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
            (
                (name, float(np.broadcast_to(value, len(smallest))[position]))
                for name, value in found.terms.items()
            ),
            key=lambda p: -p[1],
        )
        one = at.at(int(index))
        pipeline = f" pp={one['pp']}" if request.offers.pipeline else ""
        shortages.append(
            Shortage(
                f"tp={one['tp']}{pipeline} stage={one['stage']}",
                int(counts[key[index]]),
                float(needed[index]),
                room,
                tuple(parts[:3]),
            )
        )
    return tuple(shortages)
