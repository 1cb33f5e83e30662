"""Measures that reduce the memory of a layout: recomputation, chunked loss, optimizer on the host.

Note [Relief]
    A layout is first priced with the least computation and with the least memory. The measures
    between these ends are only tried if the first does not fit and the second does. The optimizer
    is moved to the host only if nothing else fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from plait.planner.hardware import FAMILIES, DeviceSpec, Numbers
from plait.planner.job import RECOMPUTE, SCHEDULES, Layouts
from plait.planner.offers import SPLIT_BACKWARD, Offers

LOSS_CHUNK = 1024
"""Tokens per chunk of the loss."""
ON_HOST = (0.25, 0.5, 0.75, 1.0)
"""Shares of the parameters whose optimizer states are on the host.

The other parameters are updated on the device, which is faster.
"""


@dataclass(frozen=True)
class Relief:
    """Values of the fields of `Layouts` that reduce memory."""

    recompute: int = 0
    every: int = 1
    kept_operators: float = 0.0
    loss_chunk: int = 0
    offload: float = 0.0


@dataclass(frozen=True)
class Reliefs:
    """Measures that the offers and the fixed fields allow."""

    on_device: tuple[Relief, ...]
    """Measures with the optimizer on the device, the lightest first. If the host is fixed, they are
    on the host.
    """
    on_host: tuple[Relief, ...]
    """Measures with the optimizer on the host; empty if that is fixed or not offered."""

    @property
    def ends(self) -> tuple[Relief, ...]:
        """Lightest measure, and those that need the least memory on the device and on the host.

        The latter come without and with recomputation, because split backwards have none.
        """
        ends = [*self.on_device[:1]]
        for reliefs in (self.on_device, self.on_host):
            without = [relief for relief in reliefs if not relief.recompute]
            ends += [*without[-1:], *reliefs[-1:]]
        return tuple(dict.fromkeys(ends))

    def between(self, *, on_host: bool) -> tuple[Relief, ...]:
        """Return the measures that are not `ends`."""
        ends = self.ends
        reliefs = self.on_host if on_host else self.on_device
        return tuple(relief for relief in reliefs if relief not in ends)


def reliefs_of(offers: Offers, device: DeviceSpec, fixed: Mapping[str, int]) -> Reliefs:
    """Return the measures for a device."""
    full, operators, budget = (RECOMPUTE.index(name) for name in ("full", "operators", "budget"))
    kinds = {
        "none": [Relief()],
        "selective": [Relief(RECOMPUTE.index("selective"))],
        "operators": [Relief(operators, every) for every in (4, 2, 1)],
        "budget": [Relief(budget, kept_operators=share) for share in (0.75, 0.5, 0.25)],
        "full": [Relief(full, every) for every in (4, 3, 2, 1)],
    }
    if fixed.get("every", 1) > 1:
        # An interval has no meaning for blocks that do not recompute.
        kinds |= {"none": [], "selective": []}
    if "every" in fixed:
        kinds |= {
            "operators": [Relief(operators, fixed["every"])],
            "full": [Relief(full, fixed["every"])],
            "budget": [],
        }

    chunks = (fixed["loss_chunk"],) if "loss_chunk" in fixed else (0, LOSS_CHUNK)
    reliefs = [
        relief for kind, choices in kinds.items() if kind in offers.recompute for relief in choices
    ]
    reliefs = [
        measure
        for measure in reliefs
        if fixed.get("recompute", measure.recompute) == measure.recompute
    ]
    reliefs = [replace(measure, loss_chunk=tokens) for measure in reliefs for tokens in chunks]
    shares = (fixed["offload"] / 100,) if fixed.get("offload", 0) else ON_HOST
    on_host = tuple(replace(measure, offload=share) for share in shares for measure in reliefs)

    # The memory of a CPU device is host memory already.
    offered = offers.offload and int(device.family) != FAMILIES.index("cpu")
    if fixed.get("offload", 0):
        return Reliefs(on_host if offered else (), ())
    return Reliefs(tuple(reliefs), on_host if offered and "offload" not in fixed else ())


def splits_backward(schedule: Numbers) -> NDArray[np.bool_]:
    """Return True if a schedule, an index into SCHEDULES, has split backwards."""
    return np.isin(np.asarray(schedule), [SCHEDULES.index(name) for name in SPLIT_BACKWARD])


def relieves(layouts: Layouts) -> NDArray[np.bool_]:
    """Return True if a layout can have its measures.

    Split backwards do not recompute, a budget counts all experts, and the host supports sharded
    states without expert parallelism only.
    """
    recomputes = np.asarray(layouts.recompute) > 0
    halves = splits_backward(layouts.schedule)
    budget = np.asarray(layouts.recompute) == RECOMPUTE.index("budget")
    split = np.asarray(layouts.ep) > 1
    on_host = np.asarray(layouts.offload) > 0

    return (
        ~(recomputes & halves)
        & ~(budget & split)
        & ~(on_host & (split | (np.asarray(layouts.stage) == 0)))
    )


def relieved(layouts: Layouts, reliefs: tuple[Relief, ...]) -> Layouts:
    """Return every layout with every measure that it can have."""
    count = np.size(layouts.tp)
    base = layouts.take(np.repeat(np.arange(count), len(reliefs)))
    relieved_layouts = replace(
        base,
        **{
            f.name: np.tile([getattr(relief, f.name) for relief in reliefs], count)
            for f in fields(Relief)
        },
    )
    return relieved_layouts.take(relieves(relieved_layouts))
