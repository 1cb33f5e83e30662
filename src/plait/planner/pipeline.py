"""Closed forms for pipeline schedules: idle time and micro-batches in flight.

Idle shares are published formulas, or were read from torch's action lists. For the best candidates
an event simulation of the schedule's table refines them. Micro-batches in flight here are those of
other frameworks; those of Plait's ranks follow from their actions (`holdings`). Units are the time
and activations of one micro-batch in one stage.
"""

from __future__ import annotations

import numpy as np

from plait.planner.hardware import Numbers
from plait.planner.job import SCHEDULES, Layouts

_IDLE = {
    "none": 0.0,
    "gpipe": 1.0,
    "1f1b": 1.0,
    "interleaved": 1.0,
    "zb-h1": 1 / 3,
    "interleaved-zb": 0.25,
    "zbv": 0.17,
    "dualpipev": 0.5,
}
"""Idle time of stages as a share of (p - 1) * (forward + backward) / chunks.

1F1B and interleaving: arXiv 2104.04473. Zero bubble: arXiv 2401.10241. ZBV and DualPipeV: READMEs
of sail-sg/zero-bubble-pipeline-parallelism and deepseek-ai/DualPipe.
"""


def idle_share(layouts: Layouts) -> Numbers:
    """Return the idle time of a stage per step.

    As a share of the other stages' time for one micro-batch.
    """
    share = np.choose(np.asarray(layouts.schedule), [_IDLE[name] for name in SCHEDULES])
    interleaved = np.isin(
        np.asarray(layouts.schedule),
        [SCHEDULES.index("interleaved"), SCHEDULES.index("interleaved-zb")],
    )
    return share / np.where(interleaved, layouts.vpp, 1)


def micro_batches_between_chunks(layouts: Layouts) -> Numbers:
    """Return the micro-batches between a stage's first and last complete gradients, at least 1.

    Interleaved chunks process `pp` micro-batches in turn, so that the gradients of all chunks
    except the last are reduced while others compute.
    """
    apart = layouts.pp * (np.asarray(layouts.vpp) - 1) / layouts.vpp
    return np.clip(apart, 1.0, np.maximum(layouts.accumulation, 1))


def in_flight(layouts: Layouts, rank: int | Numbers = 0) -> Numbers:
    """Return the largest number of micro-batches whose activations a rank holds.

    In units of all stages of the rank. For the last rank see `in_flight_last`.
    """
    pp = layouts.pp
    vpp = layouts.vpp
    micro_batches = layouts.accumulation
    deepest = [
        np.ones_like(np.asarray(pp, dtype=float)),  # none
        np.asarray(micro_batches, dtype=float),  # gpipe
        np.asarray(pp - rank, dtype=float),  # 1f1b
        pp + (pp - 1 - 2 * rank) / vpp,  # interleaved
        np.asarray(pp - rank, dtype=float),  # zb-h1
        np.asarray(pp, dtype=float),  # interleaved-zb
        np.asarray(pp, dtype=float),  # zbv
        pp + 0.5,  # dualpipev
    ]
    largest = np.choose(np.asarray(layouts.schedule), np.broadcast_arrays(*deepest))
    return np.minimum(largest, micro_batches)


def in_flight_last(layouts: Layouts) -> Numbers:
    """Return the largest number of micro-batches whose activations the last rank holds."""
    pp = layouts.pp
    vpp = layouts.vpp
    micro_batches = layouts.accumulation
    single = np.ones_like(np.asarray(pp, dtype=float))
    deepest = [
        single,
        np.asarray(micro_batches, dtype=float),
        single,
        (pp * (vpp - 1) + 1) / vpp,
        single,
        (pp * (vpp - 1) + 1) / vpp,
        np.asarray(pp, dtype=float),
        pp + 0.5,
    ]

    return np.minimum(
        np.choose(np.asarray(layouts.schedule), np.broadcast_arrays(*deepest)), micro_batches
    )
