"""The planner's view of what a rank holds in a pipeline equals the tables of the schedules."""

from dataclasses import fields

import numpy as np
import pytest

from plait.parallel.schedules.schedule import Kind, make_schedule, row_of
from plait.parallel.schedules.timeline import peak_in_flight
from plait.planner.job import SCHEDULES
from plait.planner.pipeline import Holding, holdings, rank_holdings
from plait.planner.techniques import SCHEDULE_NAMES

NAMES = [field.name for field in fields(Holding)]
TABLES = [
    *[("gpipe", pp, 1, m) for pp, m in ((2, 2), (8, 16), (4, 7))],
    *[("1f1b", pp, 1, m) for pp, m in ((2, 2), (4, 4), (8, 16), (4, 7))],
    *[
        (name, pp, v, m)
        for name in ("interleaved", "interleaved-zb")
        for pp, v, m in ((2, 2, 3), (4, 2, 4), (4, 4, 7), (8, 2, 15), (8, 4, 64))
    ],
    *[
        (name, pp, 2, m)
        for name in ("zbv", "dualpipev")
        for pp, m in ((2, 4), (4, 9), (8, 16), (8, 50))
    ],
    ("zbv", 8, 2, 8),
]
"""Schedule, stages, chunks per rank and micro-batches."""


def rank_row(schedule, pp, m, rank, blocks):
    return rank_holdings(SCHEDULES.index(schedule), pp, m, rank, blocks)


def largest(row, name):
    """Return the largest value of a field over a step."""
    return float(row[:3, :, NAMES.index(name)].max())


@pytest.mark.parametrize(("schedule", "pp", "v", "m"), TABLES)
def test_blocks_in_flight_are_those_of_the_table(schedule, pp, v, m):
    table = make_schedule(SCHEDULE_NAMES[schedule], pp=pp, microbatches=m, stages_per_rank=v)
    # Stages of different lengths, so that a wrong stage is noticed.
    sizes = tuple(1 + stage % 3 for stage in range(table.stages))
    peaks = peak_in_flight(table, sizes=sizes)
    for rank in range(pp):
        blocks = tuple(sizes[stage] for stage in table.stages_of(rank))
        assert largest(rank_row(schedule, pp, m, rank, blocks), "blocks") == peaks[rank], rank


def test_a_row_of_one_rank_is_that_of_the_table():
    for schedule, pp, v, m in TABLES:
        # Larger tables take long to compute.
        if m >= 20:
            continue
        name = SCHEDULE_NAMES[schedule]
        table = make_schedule(name, pp=pp, microbatches=m, stages_per_rank=v)
        for rank in (0, pp - 1):
            row = row_of(name, pp=pp, microbatches=m, stages_per_rank=v, rank=rank)
            assert row == table.ranks[rank], (schedule, pp, v, m, rank)


def test_gradients_grow_until_their_stage_has_ended():
    # In one round the interleaved stages end one after the other, and never two at a time.
    single_round = rank_row("interleaved", 4, 4, 0, (2, 3, 5))
    assert largest(single_round, "growing") == 5
    assert largest(single_round, "ended") == 8

    two_rounds = rank_row("interleaved", 4, 8, 0, (2, 3, 5))
    assert largest(two_rounds, "growing") == 10
    closing = holdings([two_rounds], np.array([0])).closing
    assert (closing.growing[0], closing.ended[0], closing.running[0]) == (2, 8, 2)
    assert closing.ends_root[0] == 1


def test_a_head_ends_with_its_own_stage():
    """Parameters of the last rank outside of blocks are sharded while its other stages go on."""
    row = rank_row("interleaved", 4, 8, 3, (2, 2))
    closing = holdings([row], np.array([0])).closing
    assert (closing.root[0], closing.root_ended[0]) == (0, 1)
    assert (closing.head[0], closing.ends_root[0]) == (0, 0)


@pytest.mark.parametrize(("schedule", "late"), [("interleaved", 0), ("interleaved-zb", 7)])
def test_losses_before_the_gradients_of_their_weights(schedule, late):
    table = row_of(SCHEDULE_NAMES[schedule], pp=8, microbatches=16, stages_per_rank=2, rank=7)
    assert any(action.kind is Kind.WEIGHT for action in table) == bool(late)
    assert largest(rank_row(schedule, 8, 16, 7, (1, 1)), "late_losses") >= late


def test_middle_ranks_have_neither_embedding_nor_loss():
    row = rank_row("1f1b", 4, 8, 1, (2,))
    for name in ("fronts", "losses", "head"):
        assert not row[:, :, NAMES.index(name)].any(), name
