"""Every sample is read once, whatever the number of ranks."""

from itertools import chain

import pytest
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from plait.data.split_rows import StreamPart
from plait.hf.batches import EpochOrder, Rounds

SIZE = 2
# Fewer than a batch, full and partial batches, full and partial rounds.
SAMPLES = pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 6, 7, 12, 13])
RANKS = pytest.mark.parametrize("ranks", [1, 2, 3])


def rounds_of_ranks(samples, ranks, *, drop_last=False):
    batches = BatchSampler(SequentialSampler(range(samples)), SIZE, drop_last)
    return [Rounds(batches, ranks=ranks, index=i, drop_last=drop_last) for i in range(ranks)]


def in_order(batches, rounds):
    """Return the batches of all ranks, in the order in which one process has them."""
    ordered = []
    for position in range(len(batches[0])):
        ordered += [rank_batches[position] for rank_batches in batches[: rounds.present(position)]]
    return ordered


@SAMPLES
@RANKS
def test_ranks_read_the_batches_of_one_process(samples, ranks):
    rounds = rounds_of_ranks(samples, ranks)
    batches = list(map(list, rounds))
    assert set(map(len, batches)) == {len(rounds[0])}
    expected = list(BatchSampler(SequentialSampler(range(samples)), SIZE, False))
    assert in_order(batches, rounds[0]) == expected


@SAMPLES
def test_an_incomplete_round_is_dropped(samples):
    rounds = rounds_of_ranks(samples, 2, drop_last=True)
    batches = list(map(list, rounds))
    assert list(map(len, batches)) == [len(rounds[0])] * 2 == [samples // (2 * SIZE)] * 2
    assert all(rounds[0].present(position) == 2 for position in range(5))


class Numbers(IterableDataset[int]):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        yield from range(self.count)


@SAMPLES
@RANKS
def test_ranks_read_the_samples_of_a_stream(samples, ranks):
    parts = [
        StreamPart(Numbers(samples), batch_size=SIZE, ranks=ranks, index=index, drop_last=False)
        for index in range(ranks)
    ]
    batches = [list(BatchSampler(part, SIZE, False)) for part in parts]
    assert len(set(map(len, batches))) == 1
    assert list(chain.from_iterable(in_order(batches, parts[0]))) == list(range(samples))


def test_a_worker_of_the_only_rank_repeats_nothing():
    part = StreamPart(Numbers(7), batch_size=SIZE, ranks=1, index=0, drop_last=False)
    batches = list(DataLoader(part, batch_size=SIZE, num_workers=1))
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5], [6]]


def test_every_epoch_has_an_order():
    def order(epoch):
        sampler = EpochOrder(RandomSampler(range(20)), 7)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0) == order(0) != order(1)
