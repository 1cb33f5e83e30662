"""The order of the data: a bijection in every epoch, the same global batches on every number of ranks, a function of the position."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.data.loader import Loader, shuffle_positions, validation_batches
from plait.data.packing import IGNORED, Sequences, Stream


def _sequences(count, *, length=4):
    """Sequence i is [i, i, i, i]."""
    return Sequences(
        Stream(np.repeat(np.arange(count, dtype=np.uint16), length), np.array([count * length])),
        length,
        padding=0,
    )


@given(count=st.integers(1, 3000), key=st.text(max_size=5))
def test_a_shuffle_is_a_bijection(count, key):
    found = shuffle_positions(np.arange(count), count=count, key=key)
    assert sorted(found.tolist()) == list(range(count))


def test_a_shuffle_shuffles():
    count = 20_000
    found = shuffle_positions(np.arange(count), count=count, key="0 0")
    again = shuffle_positions(np.arange(count), count=count, key="0 1")
    # Uniform random permutations have about one fixed point, and neighbours that are count / 3 apart.
    assert (found == np.arange(count)).sum() < 10
    assert (found == again).sum() < 10
    assert abs(np.abs(np.diff(found)).mean() / count - 1 / 3) < 0.02
    assert abs(np.corrcoef(found, np.arange(count))[0, 1]) < 0.03


def test_the_order_is_the_one_that_runs_were_started_with():
    """A change of these numbers changes what every interrupted run goes on with."""
    order = shuffle_positions(np.arange(10), count=10, key="0 0").tolist()
    assert order == [3, 9, 1, 0, 5, 2, 7, 8, 4, 6]


@given(
    count=st.integers(1, 60),
    batch=st.integers(1, 4),
    dp=st.sampled_from([1, 2, 3, 4]),
    seed=st.integers(0, 5),
    step=st.integers(0, 40),
)
def test_ranks_share_one_global_batch(count, batch, dp, seed, step):
    total = batch * 12  # divisible by 1, 2, 3, 4
    whole = Loader(_sequences(count), total, seed).at(step * total)
    parts = [
        Loader(_sequences(count), total, seed, rank, dp).at(step * total) for rank in range(dp)
    ]
    for key in ("input_ids", "labels"):
        assert torch.equal(torch.cat([part[key] for part in parts]), whole[key])


@given(count=st.integers(1, 50), batch=st.integers(1, 20))
def test_every_epoch_takes_each_sequence_once(count, batch):
    loader = Loader(_sequences(count), batch, 3)
    steps = -(-2 * count // batch)
    numbers = np.concatenate([loader.global_numbers(step * batch) for step in range(steps)])
    for epoch in range(2):
        assert sorted(numbers[epoch * count : (epoch + 1) * count].tolist()) == list(range(count))


def test_epochs_and_seeds_differ():
    first = Loader(_sequences(500), 500, 0)
    assert first.global_numbers(0).tolist() != first.global_numbers(500).tolist()
    assert (
        first.global_numbers(0).tolist()
        != Loader(_sequences(500), 500, 1).global_numbers(0).tolist()
    )


def test_a_larger_batch_goes_on_where_the_smaller_one_was():
    small, large = Loader(_sequences(100), 5, 0), Loader(_sequences(100), 10, 0)
    assert [*small.global_numbers(20), *small.global_numbers(25)] == large.global_numbers(
        20
    ).tolist()


@pytest.mark.parametrize("limit", [1, 5, 7, 100])
@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (3, 1), (2, 2), (2, 3)])
def test_validation_is_the_same_set_on_every_layout(limit, micro, dp):
    sequences = _sequences(11)
    per_rank = [
        list(validation_batches(sequences, limit=limit, micro=micro, dp_rank=rank, dp_size=dp))
        for rank in range(dp)
    ]
    assert len({len(batches) for batches in per_rank}) == 1, (
        "a rank with fewer batches would leave the others waiting"
    )
    seen = sorted(
        int(row[0])
        for batches in per_rank
        for batch in batches
        for row in batch["labels"]
        if row[0] != IGNORED
    )
    assert seen == [index * 11 // min(limit, 11) for index in range(min(limit, 11))]
    assert all(batch["input_ids"].shape == (micro, 4) for batches in per_rank for batch in batches)


def test_nothing_held_out_means_no_batches():
    assert list(validation_batches(_sequences(0), limit=5, micro=2, dp_rank=0, dp_size=1)) == []
