"""What lets a layout need less memory: blocks that recompute, a loss in chunks, the optimizer on
the host.

A layout is first a candidate as it computes least and as it needs least memory. What lies between
is tried where the first does not fit and the second does, and the optimizer is on the host where
nothing else fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from plait.planner.hardware import FAMILIES, Device, Numbers
from plait.planner.job import RECOMPUTE, SCHEDULES, Layouts
from plait.planner.offers import SPLIT_BACKWARD, Offers

LOSS_CHUNK = 1024
"""Tokens of a chunk of the loss."""
ON_HOST = (0.25, 0.5, 0.75, 1.0)
"""Shares of the parameters whose optimizer states are on the host: those of the others are stepped
on the device, which is faster.
"""


@dataclass(frozen=True)
class Relief:
    """Fields of `Layouts`."""

    recompute: int = 0
    every: int = 1
    kept_operators: float = 0.0
    loss_chunk: int = 0
    offload: float = 0.0


@dataclass(frozen=True)
class Reliefs:
    """All that the offers and what is fixed allow."""

    here: tuple[Relief, ...]
    """With the optimizer where it was asked for: on the device, unless the host is fixed. The
    lightest first.
    """
    on_host: tuple[Relief, ...]
    """The same with the optimizer on the host; none where that is fixed, not offered or no other
    place.
    """

    @property
    def ends(self) -> tuple[Relief, ...]:
        """The lightest, and those that need least: without recomputation, which a backward in
        halves has none of, and with; on the host.
        """
        found = [*self.here[:1]]
        for reliefs in (self.here, self.on_host):
            without = [relief for relief in reliefs if not relief.recompute]
            found += [*without[-1:], *reliefs[-1:]]
        return tuple(dict.fromkeys(found))

    def between(self, *, on_host: bool) -> tuple[Relief, ...]:
        """The others."""
        ends = self.ends
        return tuple(
            relief for relief in (self.on_host if on_host else self.here) if relief not in ends
        )


def reliefs_of(offers: Offers, device: Device, fixed: Mapping[str, int]) -> Reliefs:
    """The choice for a device."""
    full, operators, budget = (RECOMPUTE.index(name) for name in ("full", "operators", "budget"))
    kinds = {
        "none": [Relief()],
        "selective": [Relief(RECOMPUTE.index("selective"))],
        "operators": [Relief(operators, every) for every in (4, 2, 1)],
        "budget": [Relief(budget, kept_operators=share) for share in (0.75, 0.5, 0.25)],
        "full": [Relief(full, every) for every in (4, 3, 2, 1)],
    }
    if fixed.get("every", 1) > 1:  # of blocks that do not recompute there is no n-th
        kinds |= {"none": [], "selective": []}
    if "every" in fixed:
        kinds |= {
            "operators": [Relief(operators, fixed["every"])],
            "full": [Relief(full, fixed["every"])],
            "budget": [],
        }
    chunks = (fixed["loss_chunk"],) if "loss_chunk" in fixed else (0, LOSS_CHUNK)
    asked = [relief for kind, some in kinds.items() if kind in offers.recompute for relief in some]
    asked = [one for one in asked if fixed.get("recompute", one.recompute) == one.recompute]
    asked = [replace(one, loss_chunk=tokens) for one in asked for tokens in chunks]
    shares = (fixed["offload"] / 100,) if fixed.get("offload", 0) else ON_HOST
    on_host = tuple(replace(one, offload=share) for share in shares for one in asked)
    # a CPU's memory is the host's already
    offered = offers.offload and int(device.family) != FAMILIES.index("cpu")
    if fixed.get("offload", 0):
        return Reliefs(on_host if offered else (), ())
    return Reliefs(tuple(asked), on_host if offered and "offload" not in fixed else ())


def splits_backward(schedule: Numbers) -> NDArray[np.bool_]:
    """Whether a schedule, an index into SCHEDULES, computes backwards in halves."""
    return np.isin(np.asarray(schedule), [SCHEDULES.index(name) for name in SPLIT_BACKWARD])


def relieves(at: Layouts) -> NDArray[np.bool_]:
    """Whether a layout can have its relief: a backward in halves recomputes nothing, a budget
    counts all experts, a host holds shards, and no experts that are on different ranks.
    """
    again = np.asarray(at.recompute) > 0
    halves = splits_backward(at.schedule)
    budget = np.asarray(at.recompute) == RECOMPUTE.index("budget")
    split = np.asarray(at.ep) > 1
    on_host = np.asarray(at.offload) > 0
    return (
        ~(again & halves) & ~(budget & split) & ~(on_host & (split | (np.asarray(at.stage) == 0)))
    )


def relieved(at: Layouts, reliefs: tuple[Relief, ...]) -> Layouts:
    """Every layout with every relief that it can have."""
    count = np.size(at.tp)
    base = at.take(np.repeat(np.arange(count), len(reliefs)))
    found = replace(
        base,
        **{
            f.name: np.tile([getattr(relief, f.name) for relief in reliefs], count)
            for f in fields(Relief)
        },
    )
    return found.take(relieves(found))
