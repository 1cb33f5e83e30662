"""Pipeline schedules in the planner: idle time, and the tensors of a rank during a step.

Idle shares (pipeline bubbles) come from published formulas or from torch's action lists. For the
best candidates, a simulation of the schedule's action table (`parallel.schedules.schedule`)
replaces them. `in_flight` returns the micro-batches in flight for published runs of other
frameworks.

`holdings` counts the tensors that a rank of Plait has in memory: micro-batches in flight and
gradients. The counts follow from the order of the rank's actions
(`parallel.schedules.schedule.row_of`), which the runtime also executes. They are therefore exact
for stages of unequal size, odd numbers of micro-batches and split backwards. GPipe and 1F1B have
one stage per rank and simple formulas. Schedules without an action table are treated as 1F1B.

Note [Peaks of a rank]
    A moment is a point in time of a step, at the start of a rank's action. Which moment is the peak
    depends on sizes in bytes that are not known in this module. `_WEIGHTS` therefore has several
    assumptions about relative sizes, and for each of them the moment with the largest sum is
    stored. `peak_moments` later computes the bytes of these COUNT moments and takes the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.parallel.schedules.schedule import SCHEDULES as TABLES
from plait.parallel.schedules.schedule import Kind, problems_of, row_of
from plait.planner.hardware import Numbers
from plait.planner.job import SCHEDULES, Layouts
from plait.planner.techniques import SCHEDULE_NAMES

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

V_SHAPED = ("zbv", "dualpipev")
"""Schedules whose stages form a V: the last stage is on the first rank."""


def idle_share(layouts: Layouts) -> Numbers:
    """Return the idle time (bubble) of a stage per step.

    The unit is the sum of the times that all other stages need for one micro-batch.
    """
    share = np.choose(np.asarray(layouts.schedule), [_IDLE[name] for name in SCHEDULES])
    interleaved = np.isin(
        np.asarray(layouts.schedule),
        [SCHEDULES.index("interleaved"), SCHEDULES.index("interleaved-zb")],
    )
    return share / np.where(interleaved, layouts.vpp, 1)


def micro_batches_between_chunks(layouts: Layouts) -> Numbers:
    """Return how many micro-batches pass between a rank's first and last finished chunk.

    A chunk is finished when its gradients are complete. The result is at least 1. Interleaved
    chunks take turns after `pp` micro-batches each, so the gradients of all chunks except the last
    are reduced while other chunks compute.
    """
    between = layouts.pp * (np.asarray(layouts.vpp) - 1) / layouts.vpp
    return np.clip(between, 1.0, np.maximum(layouts.accumulation, 1))


def in_flight(layouts: Layouts, rank: int | Numbers = 0) -> Numbers:
    """Return the largest number of micro-batches in flight on a pipeline rank.

    A micro-batch counts as the fraction of the rank's stages that have its activations in memory.
    For the last rank use `in_flight_last`.
    """
    pp = layouts.pp
    plain = np.asarray(pp - rank, dtype=float)
    interleaved = pp + (pp - 1 - 2 * rank) / layouts.vpp
    return _in_flight(layouts, plain, interleaved, np.asarray(pp, dtype=float))


def in_flight_last(layouts: Layouts) -> Numbers:
    """Return the largest number of micro-batches in flight on the last pipeline rank."""
    pp = layouts.pp
    interleaved = (pp * (layouts.vpp - 1) + 1) / layouts.vpp
    return _in_flight(layouts, np.ones_like(np.asarray(pp, dtype=float)), interleaved, interleaved)


def _in_flight(
    layouts: Layouts, plain: Numbers, interleaved: Numbers, interleaved_zb: Numbers
) -> Numbers:
    """Return the micro-batches in flight of each layout's schedule.

    Args:
        layouts: The candidates.
        plain: Result for 1F1B and for ZB-H1.
        interleaved: Result for interleaved 1F1B.
        interleaved_zb: Result for interleaved zero bubble.
    """
    pp = np.asarray(layouts.pp, dtype=float)
    micro_batches = np.asarray(layouts.accumulation, dtype=float)
    # In the order of SCHEDULES.
    deepest = (
        np.ones_like(pp),
        micro_batches,
        plain,
        interleaved,
        plain,
        interleaved_zb,
        pp,
        pp + 0.5,
    )
    largest = np.choose(np.asarray(layouts.schedule), np.broadcast_arrays(*deepest))
    return np.minimum(largest, micro_batches)


_ROUNDS = 3
"""Rounds of micro-batches of interleaved stages after which the pattern repeats."""
_WEIGHTS = (
    (0.0, 0.0, 0.0, 0.0),
    (0.6, 0.0, 0.0, 1.0),
    (0.6, 0.1, 0.0, 1.0),
    (0.6, 0.1, 0.1, 1.0),
    (0.6, 1.0, 0.0, 1.0),
    (0.6, 1.0, 1.0, 1.0),
    (0.3, 10.0, 10.0, 0.3),
    (0.6, 0.1, 0.0, 10.0),
)
"""Assumed sizes relative to the saved tensors of a block.

The four sizes are those of the deferred gradients of a block, the gradients of its weights, the
gradients of a finished stage, and the saved tensors of a loss. See Note [Peaks of a rank].
"""


@dataclass(frozen=True)
class Holding:
    """Numbers of tensors that a rank has in memory at the start of a backward.

    Arrays have one entry per candidate, or are [COUNT, candidates] for several points of a step.
    Counts of blocks are sums over the micro-batches of all stages of the rank. Stages may have
    different numbers of blocks.
    """

    blocks: Numbers
    """Blocks whose saved tensors exist."""
    deferred: Numbers
    """Blocks with computed input gradients and deferred weight gradients."""
    messages: Numbers
    """Boundary activations that stages received and sent, and the next one, which arrives early."""
    inputs: Numbers
    """Boundary activations in addition to saved block inputs, if blocks are fully recomputed."""
    fronts: Numbers
    """Micro-batches in flight of the model's first stage."""
    losses: Numbers
    """Micro-batches of the model's last stage whose backward has not started."""
    late_losses: Numbers
    """Micro-batches of the model's last stage whose weight gradients are deferred."""
    growing: Numbers
    """Blocks of stages with some of their backwards done in this step."""
    ended: Numbers
    """Blocks of stages with all of their backwards done."""
    root: Numbers
    """1 if parameters outside the blocks had some of their backwards."""
    root_ended: Numbers
    """1 if parameters outside the blocks had all of their backwards."""
    running: Numbers
    """Blocks of the stage that is in its backward; 0 if there is none."""
    head: Numbers
    """1 if this is the model's last stage, and its loss is in memory."""
    ends_root: Numbers
    """1 if this is the last backward of parameters outside the blocks."""


_USUAL_MOMENT = 2
"""Index into _WEIGHTS of the assumptions whose point of the step is the peak most often."""
COUNT = len(_WEIGHTS)
"""Number of points of a step per kind."""
_COLUMN = {field.name: index for index, field in enumerate(fields(Holding))}
_FIELDS = len(_COLUMN)


@dataclass(frozen=True)
class Holdings:
    """Tensors of a rank at the points of a step that may be its peak.

    See Note [Peaks of a rank].
    """

    headed: Holding
    """Points with the model's last stage in its backward; zeros on a rank without this stage."""
    others: Holding
    """Points with another stage in its backward."""
    endings: Holding | None
    """Points with a stage in its last backward of the step. None in a first estimate."""
    closing: Holding
    """Last backward of the rank."""


def holdings(
    rows: Sequence[NDArray[np.float64]],
    row_indices: NDArray[np.int64],
    *,
    every_moment: bool = True,
) -> Holdings:
    """Return the tensors of candidates at the points of a step that may be the peak.

    Args:
        rows: Results of `rank_holdings` for different pipelines.
        row_indices: Index into `rows` of every candidate.
        every_moment: False returns only the most usual moment of each kind, for a fast first
            estimate.
    """
    table = np.stack(rows, axis=-1)  # [kinds, COUNT, fields, rows]
    selected = slice(None)
    if not every_moment:
        selected = slice(_USUAL_MOMENT, _USUAL_MOMENT + 1)

    def chosen(moments: NDArray[np.float64]) -> Holding:
        columns = np.moveaxis(moments, -2, 0)  # [fields, ..., rows]
        return Holding(*(np.take(column, row_indices, axis=-1) for column in columns))

    endings = chosen(table[2]) if every_moment else None
    return Holdings(
        chosen(table[0, selected]), chosen(table[1, selected]), endings, chosen(table[3, 0])
    )


@lru_cache(maxsize=100_000)
def rank_holdings(
    kind: int, pp: int, microbatches: int, rank: int, blocks: tuple[int, ...]
) -> NDArray[np.float64]:
    """Return the tensors of a pipeline rank at the points of a step that may be its peak.

    The result is an array [kinds, COUNT, fields]: kinds are the fields of `Holdings`, and fields
    are those of `Holding`.

    Args:
        kind: Index into SCHEDULES.
        pp: Number of ranks.
        microbatches: Micro-batches per step.
        rank: The rank.
        blocks: Blocks per stage of the rank, in the order of the model.
    """
    name = SCHEDULES[kind]
    stages = stages_of_rank(kind, pp, rank, len(blocks))
    table = SCHEDULE_NAMES.get(name, "1f1b")
    if len(stages) > 1 and not problems_of(
        table, pp=pp, microbatches=microbatches, stages_per_rank=len(stages)
    ):
        moments, endings = _moments_of_table(table, pp, microbatches, rank, stages, blocks)
    else:
        moments, endings = _moments_without_table(name, pp, microbatches, rank, stages, sum(blocks))

    has_head = moments[:, _COLUMN["head"]] > 0
    kinds = []
    for candidates in (moments[has_head], moments[~has_head], endings):
        if len(candidates):
            kinds.append(_select_moments(candidates))
        else:
            kinds.append(np.zeros((COUNT, _FIELDS)))

    closing = np.repeat(endings[-1:], COUNT, axis=0)
    return np.stack([*kinds, closing])


def stages_of_rank(kind: int, pp: int, rank: int, chunks: int) -> tuple[int, ...]:
    """Return the stages of a rank, in the order of the model. `kind` is an index into SCHEDULES."""
    if SCHEDULES[kind] in V_SHAPED and pp > 1:
        return rank, 2 * pp - 1 - rank
    return tuple(range(rank, pp * chunks, pp))


def _select_moments(moments: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the point of a step with the largest weighted sum, for each entry of _WEIGHTS.

    See Note [Peaks of a rank].
    """
    names = ("blocks", "deferred", "growing", "ended", "losses", "late_losses")
    blocks, deferred, growing, ended, losses, late = (moments[:, _COLUMN[name]] for name in names)
    # Among equal moments, the one with more of all other tensors is chosen.
    besides = 1e-6 * moments.sum(axis=1)
    sums = (
        blocks + a * deferred + b * growing + c * ended + d * (losses + late) + besides
        for a, b, c, d in _WEIGHTS
    )
    return np.stack([moments[np.argmax(most)] for most in sums])


def _moments_without_table(
    name: str, pp: int, microbatches: int, rank: int, stages: tuple[int, ...], blocks: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the tensors of a rank at points of a step, from the formulas for GPipe and 1F1B.

    Other schedules without an action table are treated as 1F1B, and only estimated for comparison.
    All stages of a rank are treated as one.

    Returns:
        (all points that may be the peak, the point before the last backward of the stage), as
        arrays [points, fields of `Holding`].
    """
    first = 0 in stages
    last = pp * len(stages) - 1 in stages
    messages = 2 * len(stages) - first - last
    inputs = len(stages)
    # GPipe runs all forwards before the first backward.
    deepest = microbatches
    if name != "gpipe":
        deepest = min(microbatches, pp - rank)

    def moment(flight: int, *, grown: bool, early: int = 1) -> list[float]:
        return [
            flight * blocks,
            0,
            flight * messages + early,
            flight * inputs + early,
            flight * first,
            (flight - 1) * last,
            0,
            grown * blocks,
            0,
            grown,
            0,
            blocks,
            last,
            1,
        ]

    has_several = microbatches > 1
    later = deepest if microbatches > deepest else max(deepest - 1, 1)
    return np.array(
        [moment(deepest, grown=False), moment(later, grown=has_several)], dtype=float
    ), np.array([moment(1, grown=has_several, early=0)], dtype=float)


def _moments_of_table(
    table: str,
    pp: int,
    microbatches: int,
    rank: int,
    stages: tuple[int, ...],
    blocks: tuple[int, ...],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the tensors of a rank at points of a step, from the schedule's action table.

    Returns:
        (points before all backwards, points before the last backward of a stage), as arrays
        [points, fields of `Holding`].
    """
    of_row, kinds = _row(
        table, pp, _representative_micro_batches(table, pp, microbatches), len(stages), rank
    )
    last = pp * len(stages) - 1
    is_stage = of_row[:, None] == np.array(stages)
    stage_index = is_stage.argmax(axis=1)

    def before(*which: Kind) -> NDArray[np.int64]:
        """Return how many actions of kinds `which` each stage has done before every action."""
        done = np.cumsum(is_stage & np.isin(kinds, which)[:, None], axis=0)
        return np.concatenate([np.zeros_like(done[:1]), done[:-1]])

    forward = before(Kind.FORWARD)
    ended = before(Kind.BACKWARD, Kind.WEIGHT)
    in_flight = forward - ended
    deferred = before(Kind.INPUT) - before(Kind.WEIGHT)
    forwards = (is_stage & (kinds == Kind.FORWARD)[:, None]).sum(axis=0)
    begun = ended > 0
    finished = ended >= forwards
    stage_blocks = np.array(blocks)
    is_first = np.array(stages) == 0
    is_last = np.array(stages) == last
    ends = is_first | is_last

    # A stage that sends to another stage of its rank shares the tensor with that stage.
    message = 2 - is_first - is_last - np.array([stage - 1 in stages for stage in stages])
    # The loss is not in memory during a separate backward of the weights.
    halves = kinds == Kind.WEIGHT
    index = np.arange(len(kinds))
    ends_stage = np.isin(kinds, (Kind.BACKWARD, Kind.WEIGHT)) & (
        ended[index, stage_index] == forwards[stage_index] - 1
    )
    head = is_last[stage_index] & ~halves
    root_over = finished[:, ends].all(axis=1) & ends.any()
    still_open = (~finished & ends).sum(axis=1)
    has_next = index < len(kinds) - 1
    columns = [
        in_flight @ stage_blocks,
        deferred @ stage_blocks,
        in_flight @ message + has_next,
        in_flight.sum(axis=1) + has_next,
        in_flight @ is_first,
        np.maximum((in_flight - deferred) @ is_last - head, 0),
        deferred @ is_last,
        (begun & ~finished) @ stage_blocks,
        finished @ stage_blocks,
        begun[:, ends].any(axis=1) & ~root_over,
        root_over,
        stage_blocks[stage_index],
        head,
        ends_stage & ends[stage_index] & (still_open == 1),
    ]
    moments = np.stack(columns, axis=1).astype(float)
    return moments[kinds != Kind.FORWARD], moments[ends_stage]


@lru_cache(maxsize=10_000)
def _row(
    table: str, pp: int, microbatches: int, each: int, rank: int
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return (stages, kinds) of all actions of a rank, in order."""
    row = row_of(table, pp=pp, microbatches=microbatches, stages_per_rank=each, rank=rank)
    return np.array([action.stage for action in row]), np.array([action.kind for action in row])


def _representative_micro_batches(table: str, pp: int, microbatches: int) -> int:
    """Return a number of micro-batches, at most `microbatches`, for which peaks are the same."""
    if TABLES[table].placement == "v":
        return min(microbatches, 3 * pp)
    rounds = max(1, microbatches // pp)
    return microbatches // rounds * min(rounds, _ROUNDS)
