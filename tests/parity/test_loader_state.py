"""A loader's position in a checkpoint: a resumed run reads the samples that are left."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from plait.errors import CheckpointError, InputError
from plait.verify.parity import full_tensor_on_cpu
from tests.parity import cases
from tests.parity.data_parallel import settings

STEPS = 5
SAVED_STEP = 2
TORCHDATA = importlib.util.find_spec("torchdata") is not None


class StatefulLoader:
    """Batches in a shuffled order, with the position methods of torchdata's loader."""

    def __init__(self, rank, world):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
        self._order = order[rank::world].tolist()
        self._position = 0

    def __iter__(self):
        while self._position < len(self._order):
            self._position += 2
            yield torch.tensor(self._order[self._position - 2 : self._position])

    def state_dict(self):
        # A tuple and a tensor must come back as such.
        generator = torch.zeros(3, dtype=torch.uint8)
        return {"at": self._position, "order": tuple(self._order), "generator": generator}

    def load_state_dict(self, state_dict):
        assert isinstance(state_dict["order"], tuple)
        self._position = state_dict["at"]
        self._order = list(state_dict["order"])


def loader_of(kind, rank, world):
    if kind == "duck":
        return StatefulLoader(rank, world)
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = torch.arange(24)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=4)
    return StatefulDataLoader(data, batch_size=2, sampler=sampler)


def batch_of(numbers):
    ids = torch.arange(8) * (numbers.unsqueeze(1) + 3) % cases.VOCABULARY
    return {"input_ids": ids, "labels": ids.clone()}


def engine_of(world):
    return cases.engine(cases.build("plain", tied=True), settings(world, 2, 1, 1))


def weights_of(engine):
    weights = {}
    for name, parameter in engine.model.named_parameters():
        weights[name] = full_tensor_on_cpu(parameter).detach().clone()
    return weights


def train(rank, world, kind, folder, resumes):
    """Return the numbers of all batches, and the weights. Runs on every rank."""
    engine = engine_of(world)
    loader = loader_of(kind, rank, world)
    steps = STEPS
    if resumes:
        assert engine.load_checkpoint(folder, loader=loader) is not None
        steps -= SAVED_STEP
    samples = []
    for numbers in loader:
        samples.append(numbers.tolist())
        engine.train_batch(batch_of(numbers))
        if len(samples) == SAVED_STEP and not resumes:
            engine.save_checkpoint(folder, loader=loader)
        if len(samples) == steps:
            break
    weights = weights_of(engine)
    engine.close()
    return samples, weights


@pytest.mark.parametrize(
    "kind",
    [
        "duck",
        pytest.param(
            "torchdata",
            marks=pytest.mark.skipif(not TORCHDATA, reason="torchdata is not installed"),
        ),
    ],
)
def test_in_the_middle_of_an_epoch(pool, tmp_path, kind):
    uninterrupted = pool.run(2, train, kind, str(tmp_path), False)
    resumed = pool.run(2, train, kind, str(tmp_path), True)
    for (expected_samples, expected), (samples, weights) in zip(
        uninterrupted, resumed, strict=True
    ):
        assert len(expected_samples) == STEPS
        assert samples == expected_samples[SAVED_STEP:]
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def load_on_another_layout(rank, world, folder):
    """Return messages of refusals, after which nothing has changed. Runs on every rank."""
    engine = engine_of(world)
    before = weights_of(engine)
    messages = []
    for loader, error_type in (
        (StatefulLoader(rank, world), CheckpointError),
        (iter([]), InputError),
    ):
        with pytest.raises(error_type) as error:
            engine.load_checkpoint(folder, loader=loader)
        messages.append(str(error.value))
    torch.testing.assert_close(weights_of(engine), before, rtol=0, atol=0)
    assert engine.global_steps == 0
    engine.close()
    return messages


def test_a_position_of_another_layout_is_refused(pool, tmp_path):
    pool.run(2, train, "duck", str(tmp_path), False)
    ((other_layout, stateless),) = pool.run(1, load_on_another_layout, str(tmp_path))
    assert "the layout has changed (dp_shard 2 -> 1)" in other_layout
    assert "samples would be left out or repeated" in other_layout
    assert "has no state_dict, so its position cannot be saved" in stateless
    assert "use torchdata's StatefulDataLoader" in stateless


def load_without_position(rank, world, folder):
    """Return the message of the refusal. Runs on every rank."""
    engine = engine_of(world)
    engine.save_checkpoint(folder)
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(folder, loader=StatefulLoader(rank, world))
    engine.close()
    return str(error.value)


def test_a_checkpoint_without_a_position_is_refused(pool, tmp_path):
    for message in pool.run(2, load_without_position, str(tmp_path)):
        assert "was saved without a loader; leave `loader` out" in message
