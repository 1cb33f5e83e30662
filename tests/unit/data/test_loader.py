"""The order of the data is a function of seed and position, on any number of ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.data.loader import Loader, shuffle_positions, validation_batches
from plait.data.packing import IGNORED, Sequences, Stream


def _sequences(count, *, length=4):
    """Return sequences of which number i is [i, i, i, i]."""
    tokens = np.repeat(np.arange(count, dtype=np.uint16), length)
    return Sequences(Stream(tokens, np.array([count * length])), length, padding=0)


@given(count=st.integers(1, 3000), key=st.text(max_size=5))
def test_a_shuffle_is_a_bijection(count, key):
    order = shuffle_positions(np.arange(count), count=count, key=key)
    assert sorted(order.tolist()) == list(range(count))


def test_a_shuffle_looks_random():
    count = 20_000
    order = shuffle_positions(np.arange(count), count=count, key="0 0")
    other = shuffle_positions(np.arange(count), count=count, key="0 1")
    # A random permutation has about one fixed point. Neighbours are a third of the length apart.
    assert (order == np.arange(count)).sum() < 10
    assert (order == other).sum() < 10
    assert abs(np.abs(np.diff(order)).mean() / count - 1 / 3) < 0.02
    assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 0.03


def test_the_order_of_earlier_releases_is_kept():
    """Another order would change the data of every interrupted run."""
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
    # A global batch is divisible by 1, 2, 3 and 4.
    size = batch * 12
    expected = Loader(_sequences(count), size, seed).at(step * size)
    parts = []
    for rank in range(dp):
        parts.append(Loader(_sequences(count), size, seed, rank, dp).at(step * size))
    for key in ("input_ids", "labels"):
        assert torch.equal(torch.cat([part[key] for part in parts]), expected[key])


@given(count=st.integers(1, 50), batch=st.integers(1, 20))
def test_every_epoch_has_each_sequence_once(count, batch):
    loader = Loader(_sequences(count), batch, 3)
    numbers = []
    for position in range(0, 2 * count, batch):
        numbers += loader.global_numbers(position).tolist()
    for epoch in range(2):
        assert sorted(numbers[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_epochs_and_seeds_differ():
    loader = Loader(_sequences(500), 500, 0)
    first = loader.global_numbers(0).tolist()
    assert first != loader.global_numbers(500).tolist()
    assert first != Loader(_sequences(500), 500, 1).global_numbers(0).tolist()


def test_a_larger_batch_continues_at_the_same_position():
    small = Loader(_sequences(100), 5, 0)
    large = Loader(_sequences(100), 10, 0)
    expected = [*small.global_numbers(20), *small.global_numbers(25)]
    assert large.global_numbers(20).tolist() == expected


@pytest.mark.parametrize("limit", [1, 5, 7, 100])
@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (3, 1), (2, 2), (2, 3)])
def test_validation_is_the_same_set_on_every_layout(limit, micro, dp):
    sequences = _sequences(11)
    counts = set()
    labels = []
    for rank in range(dp):
        batches = list(
            validation_batches(sequences, limit=limit, micro=micro, dp_rank=rank, dp_size=dp)
        )
        counts.add(len(batches))
        for batch in batches:
            assert batch["input_ids"].shape == (micro, 4)
            labels += batch["labels"][:, 0].tolist()
    # A rank with fewer batches would leave the others waiting.
    assert len(counts) == 1
    samples = min(limit, 11)
    scored = [label for label in labels if label != IGNORED]
    assert sorted(scored) == [index * 11 // samples for index in range(samples)]


def test_no_validation_data_means_no_batches():
    assert list(validation_batches(_sequences(0), limit=5, micro=2, dp_rank=0, dp_size=1)) == []
