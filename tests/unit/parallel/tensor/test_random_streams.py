"""Random numbers of layers that are split over ranks. A stand-in plays the CUDA generator."""

from dataclasses import dataclass
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch

from plait._torch.operators import FakeTensorMode
from plait.errors import ModelError
from plait.parallel.tensor import styles
from plait.parallel.tensor.styles import SplitStream

INPUT = torch.zeros(1)


def draws(rank, *, count):
    """Return numbers drawn before, inside and after two split layers of this rank.

    The first layer draws `count` numbers, which may differ between ranks.
    """
    torch.manual_seed(5)
    stream = SplitStream(rank)
    numbers = [torch.rand(2)]
    for split_count in (count, 2):
        stream.enter(INPUT)
        # A sibling that reads the same input does not start another stream.
        stream.enter(INPUT)
        numbers.append(torch.rand(split_count))
        stream.leave()
        numbers.append(torch.rand(2))
    return numbers


def test_ranks_differ_inside_split_layers_only():
    first = draws(0, count=3)
    second = draws(1, count=4)
    for index in (0, 2, 4):
        assert torch.equal(first[index], second[index])
    assert not torch.equal(first[1], second[1][:3])
    assert not torch.equal(first[3], second[3])
    numbers = torch.cat(first)
    assert len(numbers.unique()) == len(numbers), "a number is drawn twice"


def test_a_restored_generator_repeats_its_numbers():
    """Recomputation restores the generator, also after an exception inside a layer."""
    torch.manual_seed(5)
    stream = SplitStream(1)
    state = torch.get_rng_state()
    stream.enter(INPUT)
    first = torch.rand(3)
    stream.leave()
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    stream.enter(INPUT)
    assert torch.equal(torch.rand(3), first)

    # `leave` must not overwrite a state that something else restored.
    torch.set_rng_state(after)
    stream.leave()
    assert torch.equal(torch.get_rng_state(), after)


def test_meta_and_fake_tensors_leave_the_generator_alone():
    state = torch.get_rng_state()
    stream = SplitStream(0)
    stream.enter(torch.zeros(1, device="meta"))
    with FakeTensorMode():
        stream.enter(torch.zeros(1))
    stream.leave()
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_drawn_between_layers_of_two_inputs_are_refused():
    stream = SplitStream(0)
    hidden = torch.zeros(1)
    encoded = torch.zeros(1)
    stream.enter(INPUT, read=hidden)
    # Cross-attention reads a second input.
    stream.enter(INPUT, read=encoded)
    torch.rand(1)
    stream.enter(INPUT, read=hidden)
    message = "random numbers were drawn .dropout. between two column-parallel layers"
    with pytest.raises(ModelError, match=message):
        stream.enter(INPUT, read=encoded)
    stream.leave()


@dataclass
class FakeCudaGenerator:
    """A CUDA generator has a seed, and an offset that every draw moves by 4."""

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
        self.seed = seed
        self.offset = 0

    def draw(self):
        self.offset += 4
        return self.seed, self.offset


def test_a_cuda_generator_is_seeded_on_the_host():
    def run(rank, count):
        generator = FakeCudaGenerator(9)
        stream = SplitStream(rank)
        # The generator of a device exists only where the device does.
        with patch.object(styles, "_generator", lambda _: generator):
            numbers = [generator.draw()]
            for _ in range(2):
                stream.enter(INPUT)
                for _ in range(count):
                    numbers.append(generator.draw())
                stream.leave()
            numbers.append(generator.draw())
        assert len(set(numbers)) == len(numbers), "a number is drawn twice"
        return numbers

    first = run(0, 2)
    second = run(1, 3)
    assert first[0] == second[0]
    assert first[-1] == second[-1]
    assert not set(first[1:-1]) & set(second[1:-1])
