"""A loss that is not finite is met before the update, by all ranks; a flipped bit in a replica is found and named."""

from __future__ import annotations

from typing import Any

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
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    layout = {"dp_replicate" if stage == 0 else "dp_shard": world}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "parallel": layout,
        "faults": faults,
    }
    return plait.initialize(
        model, config, loss_fn=WeightedLoss(lambda out, batch: (out.square().sum(), len(out)), len)
    )


def tensors(engine):
    found = list(engine.model.parameters())
    found += [
        value
        for state in engine.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return [local_tensor(tensor).detach().clone() for tensor in found]


def numbers(rank, world, stage):
    """Runs in a worker: three steps, of which the second meets an infinite loss on rank 1, and then with "skip" the same."""
    found: dict[str, Any] = {}
    for policy in ("auto", "skip"):
        engine = engine_of(stage, world, non_finite=policy)
        batches = [torch.full((2, 6), float(step + rank)) for step in range(3)]
        engine.train_batch(batches[0])
        before = tensors(engine)
        bad = batches[1].clone()
        if rank == 1:
            bad[0, 0] = float("inf")
        try:
            result = engine.train_batch(bad)
            found[policy] = f"skipped: {result.skipped}, loss {float(result.loss)}"
        except NumbersError as error:
            found[policy] = str(error)
        found[f"{policy} changed"] = [
            index
            for index, (a, b) in enumerate(zip(before, tensors(engine), strict=True))
            if not torch.equal(a, b)
        ]
        found[f"{policy} after"] = float(engine.train_batch(batches[2]).loss)
        engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 2])
def test_a_loss_that_is_not_finite(pool, stage):
    for found in pool.run(2, numbers, stage):
        assert found["auto"].startswith(
            "step 2: the loss of rank 1 is not finite; the gradient of `0.weight` on rank "
        ), found
        assert "Nothing was updated: parameters and optimizer are those of step 1." in found["auto"]
        assert found["skip"].startswith("skipped: True, loss ") and found["skip"].endswith(
            ("inf", "nan")
        )
        assert found["auto changed"] == found["skip changed"] == []
        assert found["auto after"] == found["skip after"]


def flip(rank, world):
    """Runs in a worker: two equal steps with a comparison, then a bit of a moment is flipped on rank 1."""
    engine = engine_of(0, world, compare_replicas_every=2)
    for step in range(3):
        engine.train_batch(torch.full((2, 6), float(step + rank)))
    if rank == 1:
        moment = engine.optimizer.state[engine.model[1].weight]["exp_avg_sq"]
        moment.view(torch.int32).view(-1)[5] ^= 1 << 20
    try:
        engine.train_batch(torch.zeros(2, 6))
    except NumbersError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_a_flipped_bit_is_named(pool):
    for text in pool.run(2, flip):
        assert text.startswith(
            "step 4: replicas of `1.weight` differ: ranks 0-1 along dp_replicate, of which none"
        ), text


def test_one_bit_changes_the_sum():
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8):
        tensor = torch.ones(100, dtype=dtype)
        other = tensor.clone()
        other.view(torch.uint8)[7] ^= 128
        assert bits_of(tensor) != bits_of(other)


def test_nothing_to_compare_is_refused():
    with pytest.raises(ConfigError, match="the layout has no replicas to compare"):
        engine_of(0, 1, compare_replicas_every=2)
