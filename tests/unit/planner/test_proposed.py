"""Schedules that split the backward are not proposed with recomputation."""

from plait.planner.job import RECOMPUTE, SCHEDULES, Layouts
from plait.planner.techniques import SPLIT_BACKWARD, available_techniques, supports_options


def test_a_split_backward_has_no_recomputation():
    recompute = RECOMPUTE.index("full")
    for name in (*SPLIT_BACKWARD, "1f1b"):
        schedule = SCHEDULES.index(name)
        splits = name in SPLIT_BACKWARD
        assert available_techniques().runs(name, pp=2, micro_batches=8, chunks=1 + splits, zero=1)
        assert supports_options(Layouts(schedule=schedule))
        assert supports_options(Layouts(schedule=schedule, recompute=recompute)) == (not splits)
