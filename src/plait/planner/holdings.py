"""What a rank holds while it computes in a pipeline: which of its stages have how many
micro-batches in flight, which have gradients.

Read from the order of the rank's own actions, which the runtime follows too
(`parallel.schedules.schedule.row_of`), so that stages of unequal size, odd numbers of micro-batches
and backwards in halves are what they are. GPipe and 1F1B have one stage a rank and are written as
they are; schedules without a table are taken for 1F1B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.parallel.schedules.actions import Kind
from plait.parallel.schedules.schedule import SCHEDULES as TABLES
from plait.parallel.schedules.schedule import problems_of, row_of
from plait.planner.hardware import Numbers
from plait.planner.job import SCHEDULES
from plait.planner.offers import SCHEDULE_NAMES

_ROUNDS = 3
"""Interleaved stages take their micro-batches in rounds; from the third on each is as the one
before.
"""
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
"""What deferred gradients of a block, gradients of its weights, those of a stage that has ended,
and what a loss keeps may take, of what a block keeps for a backward: for each the moment with most
is remembered.
"""


@dataclass(frozen=True)
class Holding:
    """What a rank holds at one moment of a step, as a backward begins; arrays with one entry a
    candidate, or of several moments [COUNT, candidates]. `blocks` and what is counted in blocks are
    sums over micro-batches, of stages that may have different numbers of them.
    """

    blocks: Numbers
    """Blocks whose saved tensors are held."""
    deferred: Numbers
    """Of these, blocks whose inputs have their gradients, and weights not yet."""
    messages: Numbers
    """Boundary activations that stages received and sent, and one that arrives before it is needed.
    """
    inputs: Numbers
    """The same of stages whose blocks keep their input anyway."""
    fronts: Numbers
    """Micro-batches of the model's first stage."""
    losses: Numbers
    """Micro-batches of its last stage whose backward has not begun."""
    late_losses: Numbers
    """Those whose input has its gradient, and weights not yet."""
    growing: Numbers
    """Blocks of stages that have had a backward in this step, and have more to come."""
    ended: Numbers
    """Blocks of stages that have had all of theirs."""
    root: Numbers
    """1 where what is outside of the blocks has had a backward, and has more to come."""
    root_ended: Numbers
    """1 where it has had all of its."""
    running: Numbers
    """Blocks of the stage that is in its backward; 0 where there is no such moment."""
    head: Numbers
    """1 where that is the model's last stage, and its loss is in memory."""
    ends_root: Numbers
    """1 where that backward is the last one of what is outside of the blocks."""


_USUAL = 2
"""Of _WEIGHTS."""
COUNT = len(_WEIGHTS)
"""Holdings of a rank, of each kind."""
_PLACE = {field.name: index for index, field in enumerate(fields(Holding))}
_FIELDS = len(_PLACE)


@dataclass(frozen=True)
class Holdings:
    """What a rank may hold at its peak."""

    headed: Holding
    """While the model's last stage is in its backward, COUNT moments; zeros on a rank without it.
    """
    others: Holding
    """While another stage is, COUNT moments."""
    endings: Holding | None
    """While a stage is in its last backward of the step, after which its gradients are complete,
    COUNT moments; None in a first look.
    """
    closing: Holding
    """In the last backward of the rank."""


def holdings(
    rows: Sequence[NDArray[np.float64]], of: NDArray[np.int64], *, every_moment: bool = True
) -> Holdings:
    """For every candidate the row, by `found`, that `of` names. Without `every_moment` of some
    kinds the one moment that is the peak most often, for a first look at very many candidates.
    """
    table = np.stack(rows, axis=-1)  # [kinds, COUNT, fields, rows]
    among = slice(None) if every_moment else slice(_USUAL, _USUAL + 1)

    def chosen(moments: NDArray[np.float64]) -> Holding:
        return Holding(*(np.take(moments[..., place, :], of, axis=-1) for place in range(_FIELDS)))

    headed, others = (chosen(kind[among]) for kind in table[:2])
    return Holdings(headed, others, chosen(table[2]) if every_moment else None, chosen(table[3, 0]))


@lru_cache(maxsize=100_000)
def found(
    kind: int, pp: int, microbatches: int, rank: int, blocks: tuple[int, ...]
) -> NDArray[np.float64]:
    """Holdings of a rank as [kinds, COUNT, fields], for stages of the rank with so many `blocks`,
    the model's first one first.
    """
    name = SCHEDULES[kind]
    stages = (
        (rank, 2 * pp - 1 - rank)
        if name in ("zbv", "dualpipev") and pp > 1
        else tuple(range(rank, pp * len(blocks), pp))
    )
    table = SCHEDULE_NAMES.get(name, "1f1b")
    if len(stages) > 1 and not problems_of(
        table, pp=pp, microbatches=microbatches, stages_per_rank=len(stages)
    ):
        moments, endings = _walked(table, pp, microbatches, rank, stages, blocks)
    else:
        moments, endings = _written(name, pp, microbatches, rank, stages, sum(blocks))
    headed = moments[:, _PLACE["head"]] > 0
    kinds = [moments[headed], moments[~headed], endings]
    return np.stack(
        [_chosen(some) if len(some) else np.zeros((COUNT, _FIELDS)) for some in kinds]
        + [np.repeat(endings[-1:], COUNT, axis=0)]
    )


def _chosen(moments: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of all moments those with most, by each of _WEIGHTS."""
    names = ("blocks", "deferred", "growing", "ended", "losses", "late_losses")
    blocks, deferred, growing, ended, losses, late = (moments[:, _PLACE[name]] for name in names)
    besides = 1e-6 * moments.sum(axis=1)  # of equals the one with more of everything else
    sums = (
        blocks + a * deferred + b * growing + c * ended + d * (losses + late) + besides
        for a, b, c, d in _WEIGHTS
    )
    return np.stack([moments[np.argmax(most)] for most in sums])


def _written(
    name: str, pp: int, microbatches: int, rank: int, stages: tuple[int, ...], blocks: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(moments, those of them that end a stage) of GPipe and 1F1B. Without a table, for a
    comparison with what does not run, all stages of a rank are one.
    """
    first = 0 in stages
    last = pp * len(stages) - 1 in stages
    messages = 2 * len(stages) - first - last
    inputs = len(stages)
    most = microbatches if name == "gpipe" else min(microbatches, pp - rank)

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

    again = microbatches > 1
    then = most if microbatches > most else max(most - 1, 1)
    return np.array([moment(most, grown=False), moment(then, grown=again)], dtype=float), np.array(
        [moment(1, grown=again, early=0)], dtype=float
    )


def _walked(
    table: str,
    pp: int,
    microbatches: int,
    rank: int,
    stages: tuple[int, ...],
    blocks: tuple[int, ...],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The same of a schedule with a table, as every backward of the rank begins."""
    of_row, kinds = _row(table, pp, _as_many(table, pp, microbatches), len(stages), rank)
    last = pp * len(stages) - 1
    one = of_row[:, None] == np.array(stages)
    at = one.argmax(axis=1)

    def before(*which: Kind) -> NDArray[np.int64]:
        """By stage, how many of these have ended as an action begins."""
        done = np.cumsum(one & np.isin(kinds, which)[:, None], axis=0)
        return np.concatenate([np.zeros_like(done[:1]), done[:-1]])

    forward = before(Kind.FORWARD)
    ended = before(Kind.BACKWARD, Kind.WEIGHT)
    held = forward - ended
    deferred = before(Kind.INPUT) - before(Kind.WEIGHT)
    whole = (one & (kinds == Kind.FORWARD)[:, None]).sum(axis=0)
    begun = ended > 0
    over = ended >= whole
    size = np.array(blocks)
    is_first = np.array(stages) == 0
    is_last = np.array(stages) == last
    ends = is_first | is_last
    # A stage that sends to another of its rank shares with it what it sends.
    message = 2 - is_first - is_last - np.array([stage - 1 in stages for stage in stages])
    halves = kinds == Kind.WEIGHT  # which have no loss in memory
    index = np.arange(len(kinds))
    ends_stage = np.isin(kinds, (Kind.BACKWARD, Kind.WEIGHT)) & (ended[index, at] == whole[at] - 1)
    head = is_last[at] & ~halves
    root_over = over[:, ends].all(axis=1) & ends.any()
    still_open = (~over & ends).sum(axis=1)
    early = index < len(kinds) - 1
    columns = [
        held @ size,
        deferred @ size,
        held @ message + early,
        held.sum(axis=1) + early,
        held @ is_first,
        np.maximum((held - deferred) @ is_last - head, 0),
        deferred @ is_last,
        (begun & ~over) @ size,
        over @ size,
        begun[:, ends].any(axis=1) & ~root_over,
        root_over,
        size[at],
        head,
        ends_stage & ends[at] & (still_open == 1),
    ]
    moments = np.stack(columns, axis=1).astype(float)
    return moments[kinds != Kind.FORWARD], moments[ends_stage]


@lru_cache(maxsize=10_000)
def _row(
    table: str, pp: int, microbatches: int, each: int, rank: int
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """(stages, kinds) of a rank's actions, in their order."""
    row = row_of(table, pp=pp, microbatches=microbatches, stages_per_rank=each, rank=rank)
    return np.array([action.stage for action in row]), np.array([action.kind for action in row])


def _as_many(table: str, pp: int, microbatches: int) -> int:
    """So many micro-batches have all moments that a step of more has."""
    if TABLES[table].placement == "v":
        return min(microbatches, 3 * pp)
    rounds = max(1, microbatches // pp)
    return microbatches // rounds * min(rounds, _ROUNDS)
