"""Activation bytes of a rank, counted by hand, and budgets solved against every assignment."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import ConfigError
from plait.parallel.accounting.activations import RankActivations, StageFacts, StageMode
from plait.parallel.schedules.schedule import make_schedule
from plait.parallel.techniques.recompute import Recompute

SAVED_BYTES = {"none": 100, "selective": 30, "full": 4}
FLOPS = {"none": 300, "selective": 340, "full": 400}
RECEIVED_BYTES = 4
OUTSIDE_BYTES = 10
DEFERRED_BYTES = 7
"""Bytes that each block holds in addition between the two halves of a backward."""


def stage_facts(blocks, *, splits_backward, differentiable):
    """Facts of a stage with equal blocks."""
    modes = {}
    for mode, saved_bytes in SAVED_BYTES.items():
        modes[mode] = StageMode(
            saved=(saved_bytes,) * blocks,
            outside=OUTSIDE_BYTES,
            head=0,
            restored=(SAVED_BYTES["none"] - saved_bytes,) * blocks,
            flops=FLOPS[mode] * blocks,
            deferred=(saved_bytes + DEFERRED_BYTES,) * blocks if splits_backward else (),
            deferred_outside=OUTSIDE_BYTES if splits_backward else 0,
        )
    return StageFacts(modes, RECEIVED_BYTES, differentiable)


def activations_of(name, rank, *, microbatches=4, blocks=2):
    """Activations of one of two ranks with this schedule."""
    schedule = make_schedule(name, pp=2, microbatches=microbatches)
    stages = [
        stage_facts(blocks, splits_backward=schedule.splits_backward, differentiable=stage > 0)
        for stage in schedule.stages_of(rank)
    ]
    return RankActivations(schedule, rank, tuple(stages))


def bytes_by_action(rank, modes):
    return {str(action): held_bytes for action, held_bytes in rank.held_after(modes)}


def test_one_forward_one_backward_by_hand():
    """The first of two ranks holds two micro-batches, the last one holds one."""
    first = activations_of("1f1b", 0)
    last = activations_of("1f1b", 1)
    modes = ("full", "none")
    single = OUTSIDE_BYTES + 4 + 100
    restored = 100 - 4

    held_bytes = list(bytes_by_action(first, modes).values())
    assert held_bytes == [single, 2 * single] * 3 + [single, 0]
    assert list(bytes_by_action(last, modes).values()) == [single, 0] * 4
    assert first.peak_bytes(modes) == 2 * single + restored
    assert last.peak_bytes(modes) == single + restored
    assert first.most_in_flight() == 2
    assert last.most_in_flight() == 1
    assert first.repeated(modes) == FLOPS["full"] - FLOPS["none"]


def test_consecutive_stages_of_a_rank_share_a_tensor():
    """The last rank of a V has consecutive stages, which share a tensor that counts once."""
    rank = activations_of("zbv", 1, blocks=1)
    assert rank.schedule.stages_of(1) == (1, 2)
    forwards = list(bytes_by_action(rank, ("none", "none")).values())[:2]
    assert forwards == [110, 2 * 110 - RECEIVED_BYTES]


def test_a_split_backward_by_hand():
    rank = activations_of("zbv", 1, microbatches=1)
    recomputed = ("full",) * 4
    held_bytes = bytes_by_action(rank, recomputed)
    assert list(held_bytes) == ["1F0", "2F0", "2I0", "2W0", "1I0", "1W0"]

    both_stages = 2 * (OUTSIDE_BYTES + 2 * 4) - RECEIVED_BYTES
    assert held_bytes["2F0"] == both_stages
    assert held_bytes["2I0"] == both_stages + 2 * DEFERRED_BYTES
    # 2W0 restores both blocks of stage 2 while stage 1 still waits for its backward.
    assert rank.peak_bytes(recomputed) == both_stages + 2 * DEFERRED_BYTES + 2 * 96
    # Without recompute nothing is restored, and the peak is between the halves.
    plain_bytes = 2 * (OUTSIDE_BYTES + 2 * 100) - RECEIVED_BYTES
    assert rank.peak_bytes(("none",) * 4) == plain_bytes + 2 * DEFERRED_BYTES


@settings(max_examples=40)
@given(
    budget=st.integers(0, 1500),
    name=st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b", "zbv"]),
    rank=st.integers(0, 1),
)
def test_a_budget_is_met_with_the_least_recomputation(budget, name, rank):
    """The optimum is over all assignments in which earlier blocks save no more than later ones."""
    activations = activations_of(name, rank, blocks=1 if name.startswith(("i", "z")) else 2)
    solved = activations.solve(budget)
    least_bytes, least_modes = activations.least()
    assert activations.peak_bytes(least_modes) == least_bytes

    order = ("full", "selective", "none")
    fitting = []
    for modes in product(order, repeat=activations.blocks):
        is_ordered = list(modes) == sorted(modes, key=order.index)
        if is_ordered and activations.peak_bytes(modes) <= budget:
            fitting.append(modes)
    assert (solved is None) == (least_bytes > budget) == (not fitting)
    if solved is not None:
        assert activations.peak_bytes(solved) <= budget
        assert activations.repeated(solved) == min(map(activations.repeated, fitting))


def test_all_ranks_refuse_together():
    ranks = [activations_of("1f1b", rank) for rank in (0, 1)]
    first_bytes, last_bytes = (rank.least()[0] for rank in ranks)
    technique = Recompute(mode="budget", budget_bytes=last_bytes, sequence_length=8)
    message = "rank 0 of the pipeline needs at least .* up to 2 micro-batches in flight"
    for rank in (0, 1):
        with pytest.raises(ConfigError, match=message) as error:
            technique.solved(ranks, rank=rank)
        assert len(error.value.problems) == 1

    sufficient = technique.model_copy(update={"budget_bytes": first_bytes})
    first, last = (sufficient.solved(ranks, rank=rank).assignment for rank in (0, 1))
    assert first == ("full", "full")
    assert ranks[0].repeated(first) >= ranks[1].repeated(last or ())


def test_an_assignment_needs_one_mode_per_block():
    with pytest.raises(ValueError, match="1 modes for 2 blocks"):
        activations_of("1f1b", 0).peak_bytes(("none",))
