"""Figures of stages put together by a schedule's row, counted by hand; a budget solved against every assignment there is."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import ConfigError
from plait.parallel.accounting.activations import RankActivations, StageFacts, StageMode
from plait.parallel.schedules.schedule import make_schedule
from plait.parallel.techniques.recompute import Recompute

KEPT = {"none": 100, "selective": 30, "full": 4}
FLOPS = {"none": 300, "selective": 340, "full": 400}
RECEIVED = 4


def stage(blocks, *, halves=False, differentiable=True):
    """Blocks alike; between the halves of a backward each holds 7 more."""
    modes = {
        mode: StageMode(
            saved=(kept,) * blocks,
            outside=10,
            head=0,
            restored=(KEPT["none"] - kept,) * blocks,
            flops=FLOPS[mode] * blocks,
            deferred=(kept + 7,) * blocks if halves else (),
            deferred_outside=10 if halves else 0,
        )
        for mode, kept in KEPT.items()
    }
    return StageFacts(modes, RECEIVED, differentiable)


def rank_of(name, rank, *, microbatches=4, blocks=2, pp=2):
    schedule = make_schedule(name, pp=pp, microbatches=microbatches)
    own = tuple(
        stage(blocks, halves=schedule.splits_backward, differentiable=index > 0)
        for index in schedule.stages_of(rank)
    )
    return RankActivations(schedule, rank, own)


def test_one_forward_one_backward_by_hand():
    """The first of two ranks holds two micro-batches, the last one."""
    first, last = rank_of("1f1b", 0), rank_of("1f1b", 1)
    modes = ("full", "none")
    one = 10 + 4 + 100
    held = [held for _, held in first.held_after(modes)]
    assert held == [one, 2 * one, one, 2 * one, one, 2 * one, one, 0]
    assert [held for _, held in last.held_after(modes)] == [one, 0] * 4
    assert (first.peak_bytes(modes), last.peak_bytes(modes)) == (2 * one + 96, one + 96)
    assert (first.most_in_flight(), last.most_in_flight()) == (2, 1)
    assert first.repeated(modes) == 100


def test_a_stage_after_another_on_one_rank_shares_its_input():
    """In a V the last rank has two stages in a row: what one hands to the other is there once."""
    rank = rank_of("zbv", 1, blocks=1)
    assert rank.schedule.stages_of(1) == (1, 2)
    held = dict(rank.held_after(("none", "none")))
    forwards = list(held.values())[:2]
    assert forwards == [110, 2 * 110 - RECEIVED]


def test_halves_by_hand():
    """After the first half a block holds 7 more; while it runs, what comes back; in the second half all blocks come back."""
    whole, again = rank_of("zbv", 1, blocks=2, microbatches=1), ("full",) * 4
    actions = [str(action) for action, _ in whole.held_after(again)]
    assert actions == ["1F0", "2F0", "2I0", "2W0", "1I0", "1W0"]
    held = {str(action): count for action, count in whole.held_after(again)}
    assert held["2I0"] - held["2F0"] == 2 * 7
    both = 2 * (10 + 2 * 4) - RECEIVED
    assert held["2F0"] == both
    # In 2W0 both blocks of stage 2 come back, and stage 1 still waits for its backward.
    assert whole.peak_bytes(again) == both + 2 * 7 + 2 * 96
    # Without recompute nothing comes back, and the most is what waits between the halves.
    assert whole.peak_bytes(("none",) * 4) == 2 * (10 + 2 * 100) - RECEIVED + 2 * 7


@settings(max_examples=40, deadline=None)
@given(
    budget=st.integers(0, 1500),
    name=st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b", "zbv"]),
    rank=st.integers(0, 1),
)
def test_a_budget_is_kept_with_the_least_work(budget, name, rank):
    """Within the budget, with the least work among all assignments in order (the first blocks keep least); what is the least that can be
    kept is."""
    at = rank_of(name, rank, blocks=1 if name in ("interleaved-1f1b", "zbv") else 2)
    found, (least, how) = at.solve(budget), at.least()
    assert at.peak_bytes(how) == least
    rising = {"full": 0, "selective": 1, "none": 2}
    ordered = [
        modes
        for modes in product(KEPT, repeat=at.blocks)
        if [rising[m] for m in modes] == sorted(rising[m] for m in modes)
    ]
    fitting = [modes for modes in ordered if at.peak_bytes(modes) <= budget]
    assert (found is None) == (least > budget) == (not fitting)
    if found is not None:
        assert at.peak_bytes(found) <= budget
        assert at.repeated(found) == min(at.repeated(modes) for modes in fitting)


def test_all_ranks_refuse_together():
    ranks = [rank_of("1f1b", rank) for rank in (0, 1)]
    needed = [rank.least()[0] for rank in ranks]
    technique = Recompute(mode="budget", budget_bytes=needed[1], sequence_length=8)
    for rank in (0, 1):
        words = "rank 0 of the pipeline needs at least .* up to 2 micro-batches in flight"
        with pytest.raises(ConfigError, match=words) as caught:
            technique.solved(ranks, rank=rank)
        assert len(caught.value.problems) == 1
    enough = technique.model_copy(update={"budget_bytes": needed[0]})
    assert enough.solved(ranks, rank=0).assignment == ("full", "full")
    work = [
        ranks[rank].repeated(enough.solved(ranks, rank=rank).assignment or ()) for rank in (0, 1)
    ]
    assert work[0] >= work[1]
    with pytest.raises(ValueError, match="1 modes for 2 blocks"):
        ranks[0].peak_bytes(("none",))
