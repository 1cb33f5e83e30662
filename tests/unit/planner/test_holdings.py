"""What a rank holds against the tables of the schedules: micro-batches in flight, gradients, losses."""

from dataclasses import fields

import numpy as np
import pytest

from plait.parallel.schedules.schedule import Kind, make_schedule, row_of
from plait.parallel.schedules.timeline import peak_in_flight
from plait.planner.job import SCHEDULES
from plait.planner.pipeline import Holding, holdings, rank_holdings
from plait.planner.techniques import SCHEDULE_NAMES

_NAMES = [field.name for field in fields(Holding)]
_TABLES = [
    *((name, pp, 1, m) for name in ("gpipe", "1f1b") for pp, m in ((2, 2), (4, 4), (8, 16), (4, 7))),
    *((name, pp, v, m) for name in ("interleaved", "interleaved-zb") for pp, v, m in ((2, 2, 3), (4, 2, 4), (4, 4, 7), (8, 2, 15), (8, 4, 64))),
    *((name, pp, 2, m) for name in ("zbv", "dualpipev") for pp, m in ((2, 4), (4, 9), (8, 16), (8, 50))),
    ("zbv", 8, 2, 8),
]  # fmt: skip


def most(schedule, pp, m, rank, blocks, name):
    """The largest of a field over all that is remembered of a rank."""
    return float(
        rank_holdings(SCHEDULES.index(schedule), pp, m, rank, blocks)[
            :3, :, _NAMES.index(name)
        ].max()
    )


@pytest.mark.parametrize(("schedule", "pp", "v", "m"), _TABLES)
def test_blocks_in_flight_are_those_of_the_table(schedule, pp, v, m):
    """On every rank, of stages that are not equally long, and for many more micro-batches than are walked."""
    table = make_schedule(SCHEDULE_NAMES[schedule], pp=pp, microbatches=m, stages_per_rank=v)
    sizes = tuple(1 + stage % 3 for stage in range(table.stages))
    peaks = peak_in_flight(table, sizes=sizes)
    for rank in range(pp):
        blocks = tuple(sizes[stage] for stage in table.stages_of(rank))
        assert most(schedule, pp, m, rank, blocks, "blocks") == peaks[rank], rank


@pytest.mark.parametrize(("schedule", "pp", "v", "m"), [case for case in _TABLES if case[3] < 20])
def test_a_row_alone_is_the_tables(schedule, pp, v, m):
    name = SCHEDULE_NAMES[schedule]
    table = make_schedule(name, pp=pp, microbatches=m, stages_per_rank=v)
    for rank in (0, pp - 1):
        assert (
            row_of(name, pp=pp, microbatches=m, stages_per_rank=v, rank=rank) == table.ranks[rank]
        )


def test_gradients_grow_until_their_stage_has_ended():
    """Of interleaved stages with one round, which end one after the other: never those of two at a time."""
    assert most("interleaved", 4, 4, 0, (2, 3, 5), "growing") == 5
    assert most("interleaved", 4, 4, 0, (2, 3, 5), "ended") == 8
    assert most("interleaved", 4, 8, 0, (2, 3, 5), "growing") == 10
    (row,) = (rank_holdings(SCHEDULES.index("interleaved"), 4, 8, 0, (2, 3, 5)),)
    closing = holdings([row], np.array([0])).closing
    assert (closing.growing[0], closing.ended[0], closing.running[0], closing.ends_root[0]) == (
        2,
        8,
        2,
        1,
    )


def test_a_head_ends_with_its_own_stage():
    """And what is outside of the blocks of the last rank has its shards while the other stages go on."""
    row = rank_holdings(SCHEDULES.index("interleaved"), 4, 8, 3, (2, 2))
    closing = holdings([row], np.array([0])).closing
    assert (closing.root[0], closing.root_ended[0], closing.head[0], closing.ends_root[0]) == (
        0,
        1,
        0,
        0,
    )


@pytest.mark.parametrize(("schedule", "late"), [("interleaved", 0), ("interleaved-zb", 7)])
def test_losses_whose_weights_have_no_gradients_yet(schedule, late):
    table = row_of(SCHEDULE_NAMES[schedule], pp=8, microbatches=16, stages_per_rank=2, rank=7)
    assert any(action.kind is Kind.WEIGHT for action in table) == bool(late)
    assert most(schedule, 8, 16, 7, (1, 1), "late_losses") >= late


def test_ranks_between_the_ends_have_neither_embedding_nor_loss():
    row = rank_holdings(SCHEDULES.index("1f1b"), 4, 8, 1, (2,))
    zeros = ("fronts", "losses", "head")
    assert not any(row[:, :, _NAMES.index(name)].any() for name in zeros)
