"""Streams of random numbers of split parts (defect A19), without a process group; and of a CUDA generator, which is played."""

from dataclasses import dataclass
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch

from plait._torch.operators import FakeTensorMode
from plait.errors import ModelError
from plait.parallel.tensor import styles
from plait.parallel.tensor.styles import SplitStream

HERE = torch.zeros(1)


def drawn(rank, *, own):
    """Numbers before, inside of and behind two parts, the first of which takes `own` numbers."""
    torch.manual_seed(5)
    stream, found = SplitStream(rank), [torch.rand(2)]
    for count in (own, 2):
        stream.enter(HERE)
        stream.enter(HERE)  # siblings
        found.append(torch.rand(count))
        stream.leave()
        found.append(torch.rand(2))
    return found


def test_parts_have_their_own_numbers_and_what_follows_is_shared():
    one, other = drawn(0, own=3), drawn(1, own=4)
    for index in (0, 2, 4):
        assert torch.equal(one[index], other[index])
    assert not torch.equal(one[1], other[1][:3])
    assert not torch.equal(one[3], other[3])
    assert len({float(number) for numbers in one for number in numbers}) == sum(
        len(numbers) for numbers in one
    ), "no number twice"


def test_a_restored_shared_generator_repeats_its_numbers():
    """Recomputation, also where it was left in a part by an exception."""
    torch.manual_seed(5)
    stream, state = SplitStream(1), torch.get_rng_state()
    stream.enter(HERE)
    first = torch.rand(3)
    stream.leave()
    behind = torch.get_rng_state()
    torch.set_rng_state(state)
    stream.enter(HERE)
    assert torch.equal(torch.rand(3), first)
    torch.set_rng_state(behind)  # not by `leave`
    stream.leave()
    assert torch.equal(torch.get_rng_state(), behind)


def test_nothing_happens_where_nothing_is_computed():
    state, stream = torch.get_rng_state(), SplitStream(0)
    stream.enter(torch.zeros(1, device="meta"))
    with FakeTensorMode():
        stream.enter(torch.zeros(1))
    stream.leave()
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_drawn_for_what_another_layer_reads_are_refused():
    stream, read, other = SplitStream(0), torch.zeros(1), torch.zeros(1)
    stream.enter(HERE, read=read)
    stream.enter(HERE, read=other)  # a second input (cross-attention)
    torch.rand(1)
    stream.enter(HERE, read=read)
    words = "random numbers were drawn .dropout. between two column-parallel layers"
    with pytest.raises(ModelError, match=words):
        stream.enter(HERE, read=other)
    stream.leave()


@dataclass
class Played:
    """A CUDA generator: a seed, and an offset that every draw moves by 4."""

    seed: int
    offset: int = 0
    device: ClassVar[torch.device] = torch.device("cuda", 0)

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        self.offset = offset

    def manual_seed(self, seed):
        assert 0 <= seed < 2**64
        self.seed, self.offset = seed, 0

    def draw(self):
        self.offset += 4
        return self.seed, self.offset


def test_a_cuda_generator_is_seeded_without_a_kernel():
    """By seed and offset, which are numbers on the host."""

    def run(rank, own):
        generator, stream, found = Played(9), SplitStream(rank), []
        with patch.object(styles, "_generator", lambda _: generator):
            found.append(generator.draw())
            for _ in range(2):
                stream.enter(HERE)
                found += [generator.draw() for _ in range(own)]
                stream.leave()
            found.append(generator.draw())
        assert len(set(found)) == len(found), "no number twice"
        return found

    one, other = run(0, 2), run(1, 3)
    assert one[0] == other[0]
    assert one[-1] == other[-1]
    assert not set(one[1:-1]) & set(other[1:-1])
