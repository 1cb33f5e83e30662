"""A loss that is not finite changes no weight, and a flipped bit of a replica is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import plait
from plait._torch.tensors import local_tensor
from plait.errors import ConfigError, NumbersError
from plait.losses.loss import WeightedLoss
from plait.sharded.alike import bits_of


def engine_of(stage, world, **faults):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "parallel": {"dp_replicate" if stage == 0 else "dp_shard": world},
        "faults": faults,
    }
    return plait.initialize(
        nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)),
        config,
        loss_fn=WeightedLoss(lambda out, batch: (out.square().sum(), len(out)), len),
    )


def parameters_and_states(engine):
    """Copies of all parameters and optimizer states of this rank."""
    tensors = list(engine.model.parameters())
    for state in engine.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [local_tensor(tensor).detach().clone() for tensor in tensors]


def train_on_infinity(rank, world, stage, policy):
    """Train on an infinite input of rank 1 in the second of three steps. Runs on every rank.

    Returns:
        The message of the second step, and the loss of the third.
    """
    engine = engine_of(stage, world, non_finite=policy)
    engine.train_batch(torch.full((2, 6), float(rank)))
    before = parameters_and_states(engine)
    inputs = torch.full((2, 6), 1.0 + rank)
    if rank == 1:
        inputs[0, 0] = float("inf")
    try:
        result = engine.train_batch(inputs)
        message = f"skipped: {result.skipped}, loss {float(result.loss)}"
    except NumbersError as error:
        message = str(error)
    torch.testing.assert_close(parameters_and_states(engine), before, rtol=0, atol=0)
    loss = float(engine.train_batch(torch.full((2, 6), 2.0 + rank)).loss)
    engine.close()
    return message, loss


@pytest.mark.parametrize("stage", [0, 2])
def test_a_loss_that_is_not_finite_changes_nothing(pool, stage):
    refused = pool.run(2, train_on_infinity, stage, "auto")
    skipped = pool.run(2, train_on_infinity, stage, "skip")
    for message, _ in refused:
        start = "step 2: the loss of rank 1 is not finite; the gradient of `0.weight` on rank "
        assert message.startswith(start), message
        assert "Nothing was updated: parameters and optimizer are those of step 1." in message
    for message, _ in skipped:
        assert message.startswith("skipped: True, loss "), message
        assert message.endswith(("inf", "nan")), message
    assert [loss for _, loss in refused] == [loss for _, loss in skipped]


def flip_a_bit(rank, world):
    """Train three steps with comparisons, then flip a bit of a moment of rank 1.

    Runs on every rank.
    """
    engine = engine_of(0, world, compare_replicas_every=2)
    for step in range(3):
        engine.train_batch(torch.full((2, 6), float(step + rank)))
    if rank == 1:
        moment = engine.optimizer.state[engine.model[1].weight]["exp_avg_sq"]
        moment.view(torch.int32).view(-1)[5] ^= 1 << 20
    with pytest.raises(NumbersError) as error:
        engine.train_batch(torch.zeros(2, 6))
    engine.close()
    return str(error.value)


def test_a_flipped_bit_is_named(pool):
    for message in pool.run(2, flip_a_bit):
        start = "step 4: replicas of `1.weight` differ: ranks 0-1 along dp_replicate, of which none"
        assert message.startswith(start), message


def test_one_bit_changes_the_sum():
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8):
        tensor = torch.ones(100, dtype=dtype)
        other = tensor.clone()
        other.view(torch.uint8)[7] ^= 128
        assert bits_of(tensor) != bits_of(other)


def test_a_comparison_without_replicas_is_refused():
    with pytest.raises(ConfigError, match="the layout has no replicas to compare"):
        engine_of(0, 1, compare_replicas_every=2)
