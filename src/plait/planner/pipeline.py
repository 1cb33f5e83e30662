"""Idle time and micro-batches in flight of pipeline schedules, in closed form.

Published formulas and, for schedules of torch, figures read from its own action lists; an event
simulation of the schedule's table refines the best candidates. Micro-batches in flight are those of
other frameworks' runs; what Plait's own ranks hold is read from their actions (`holdings`). Units:
the time and the activations of one micro-batch in one stage.
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
"""Share of (p - 1) x (forward + backward) / chunks that the stages wait. 1F1B and interleaving:
arXiv 2104.04473; zero bubble: arXiv 2401.10241; ZBV and DualPipeV: the READMEs of
sail-sg/zero-bubble-pipeline-parallelism and deepseek-ai/DualPipe.
"""


def idle_share(layouts: Layouts) -> Numbers:
    """Share of the other stages' time for one micro-batch that a stage waits in a step."""
    share = np.choose(np.asarray(layouts.schedule), [_IDLE[name] for name in SCHEDULES])
    interleaved = np.isin(
        np.asarray(layouts.schedule),
        [SCHEDULES.index("interleaved"), SCHEDULES.index("interleaved-zb")],
    )
    return share / np.where(interleaved, layouts.vpp, 1)


def chunks_apart(layouts: Layouts) -> Numbers:
    """How many micro-batches' backward lies between the end of a stage's first gradients and that
    of its last, at least 1: of interleaved chunks each takes `pp` micro-batches in turn, so that
    those of all chunks but the last are reduced under the others' computation.
    """
    apart = layouts.pp * (np.asarray(layouts.vpp) - 1) / layouts.vpp
    return np.clip(apart, 1.0, np.maximum(layouts.accumulation, 1))


def in_flight(layouts: Layouts, rank: int | Numbers = 0) -> Numbers:
    """Micro-batches whose activations a rank of the pipeline holds at most, in units of all its
    stages. For the last rank see `in_flight_last`.
    """
    pp = layouts.pp
    vpp = layouts.vpp
    m = layouts.accumulation
    deepest = [
        np.ones_like(np.asarray(pp, dtype=float)),  # none
        np.asarray(m, dtype=float),  # gpipe
        np.asarray(pp - rank, dtype=float),  # 1f1b
        pp + (pp - 1 - 2 * rank) / vpp,  # interleaved
        np.asarray(pp - rank, dtype=float),  # zb-h1
        np.asarray(pp, dtype=float),  # interleaved-zb
        np.asarray(pp, dtype=float),  # zbv
        pp + 0.5,  # dualpipev
    ]
    held = np.choose(np.asarray(layouts.schedule), np.broadcast_arrays(*deepest))
    return np.minimum(held, m)


def in_flight_last(layouts: Layouts) -> Numbers:
    """The same for the last stage."""
    pp = layouts.pp
    vpp = layouts.vpp
    m = layouts.accumulation
    one = np.ones_like(np.asarray(pp, dtype=float))
    deepest = [
        one,
        np.asarray(m, dtype=float),
        one,
        (pp * (vpp - 1) + 1) / vpp,
        one,
        (pp * (vpp - 1) + 1) / vpp,
        np.asarray(pp, dtype=float),
        pp + 0.5,
    ]
    return np.minimum(np.choose(np.asarray(layouts.schedule), np.broadcast_arrays(*deepest)), m)
