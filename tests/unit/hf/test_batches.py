"""Each sample once, whatever the number of ranks."""

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


def rounds(samples, size, ranks, index, *, drop_last=False):
    inner = BatchSampler(SequentialSampler(range(samples)), size, drop_last)
    return Rounds(inner, ranks=ranks, index=index, drop_last=drop_last)


SAMPLES = pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 6, 7, 12, 13])
RANKS = pytest.mark.parametrize("ranks", [1, 2, 3])


@SAMPLES
@RANKS
def test_every_sample_once(samples, ranks):
    """And as one process has them; every rank has the same number of batches."""
    every = [rounds(samples, 2, ranks, index) for index in range(ranks)]
    read = [list(one) for one in every]
    assert {len(one) for one in read} == {len(every[0])}
    own = [
        read[index][position]
        for position in range(len(read[0]))
        for index in range(every[0].present(position))
    ]
    assert own == list(BatchSampler(SequentialSampler(range(samples)), 2, False))


@SAMPLES
def test_what_fills_no_round_is_dropped(samples):
    every = [rounds(samples, 2, 2, index, drop_last=True) for index in range(2)]
    read = [list(one) for one in every]
    assert [len(one) for one in read] == [len(every[0])] * 2 == [samples // 4] * 2
    assert all(every[0].present(position) == 2 for position in range(5))


class Numbers(IterableDataset[int]):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        yield from range(self.count)


@SAMPLES
@RANKS
def test_every_sample_of_a_stream_once(samples, ranks):
    size = 2
    parts = [
        StreamPart(Numbers(samples), batch_size=size, ranks=ranks, index=index, drop_last=False)
        for index in range(ranks)
    ]
    read = [list(part) for part in parts]
    batches = [[one[begin : begin + size] for begin in range(0, len(one), size)] for one in read]
    assert len({len(one) for one in batches}) == 1
    own = [
        batches[index][position]
        for position in range(len(batches[0]))
        for index in range(parts[0].present(position))
    ]
    assert [number for batch in own for number in batch] == list(range(samples))


def test_a_worker_of_the_only_rank_repeats_nothing():
    part = StreamPart(Numbers(7), batch_size=2, ranks=1, index=0, drop_last=False)
    assert [
        number
        for batch in DataLoader(part, batch_size=2, num_workers=1)
        for number in batch.tolist()
    ] == list(range(7))


def test_an_order_for_every_epoch():
    def order(epoch):
        sampler = EpochOrder(RandomSampler(range(20)), 7)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0) == order(0) != order(1)
