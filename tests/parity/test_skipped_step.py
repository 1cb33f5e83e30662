"""A step that is skipped changes nothing but the loss scale: weights, moments, schedule, and what compression carries on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import plait
from plait.comm.all_reduce import Flat
from plait.comm.compress import PowerSGDBuckets, QuantisedBuckets
from plait.losses.loss import WeightedLoss
from tests.parity import cases
from tests.parity.data_parallel import settings

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
SCHEDULE = {
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 0.01}}
}
COMPRESSED = {"compress_gradients": "int8", "error_feedback": True}


def everything(engine):
    """This rank's tensors that a step changes."""
    found = {
        f"weight {index}": p.to_local().detach().clone()
        for index, p in enumerate(engine.model.parameters())
    }
    for index, state in enumerate(engine.optimizer.state.values()):
        found |= {
            f"moment {index} {name}": getattr(value, "to_local", lambda v=value: v)().clone()
            for name, value in state.items()
        }
    found |= {f"carried {name}": value.clone() for name, value in engine.hooks.state().items()}
    return found | {
        "random": torch.get_rng_state(),
        "rate": torch.tensor([*engine.get_lr(), engine.lr_scheduler.last_epoch]),
    }


def skip(rank, world, stage, overflows):
    """Runs in a worker: four steps, of which the third meets an infinite gradient in its first micro-batch, on the last rank alone."""
    config = settings(world, stage, 1, 2, **FP16, **SCHEDULE)
    config["parallel"] |= COMPRESSED
    engine = cases.engine(cases.build("plain", tied=True, dtype=torch.float32), config)
    first = [True]

    def exploding(output, batch):
        total, weight = plait.causal_lm_loss(output, batch)
        grows, first[0] = first[0] and rank == world - 1, False
        return total * 1e38 * 1e38 if grows else total, weight

    unlike = []
    for index, step in enumerate(cases.ragged_steps(world * 2, steps=4, keys=())):
        before = everything(engine)
        if index == 2:
            if not overflows:
                continue
            engine.loss_fn = WeightedLoss(exploding, plait.causal_lm_loss.weight)
        result = engine.train_batch(
            [{**piece, "side": True} for piece in step[rank * 2 : rank * 2 + 2]]
        )
        engine.loss_fn = plait.causal_lm_loss
        assert result.skipped == (index == 2)
        if index == 2:
            after = everything(engine)
            scaled = {
                name: value / 2 if name.startswith("carried") else value
                for name, value in before.items()
            }
            unlike = [name for name, value in scaled.items() if not torch.equal(value, after[name])]
            assert any(
                name.startswith("carried") and bool(value.any()) for name, value in before.items()
            )
    return {"unlike": unlike, "end": everything(engine)}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_skipped_step_changes_nothing(pool, stage):
    """A22: also where one micro-batch on one rank overflowed, and others had been reduced by then. Errors are in the loss scale's units,
    which was halved."""
    for found in pool.run(2, skip, stage, True):
        assert found["unlike"] == []


def buckets(rank, world):
    """Runs in a worker: what stage 0's buckets carry, by way, after a step that is skipped."""
    shapes = ((40, 30), (64, 8))
    flats = [Flat(torch.float32, shapes), Flat(torch.float32, shapes)]
    said = []
    for revocable in (True, False):
        made: list[Any] = [
            QuantisedBuckets(
                dist.group.WORLD,
                flats,
                torch.device("cpu"),
                bits=8,
                feedback=True,
                revocable=revocable,
            ),
            PowerSGDBuckets(
                dist.group.WORLD,
                flats,
                torch.device("cpu"),
                rank=2,
                uncompressed_steps=1,
                revocable=revocable,
            ),
        ]
        for way in made:
            for step, skipped in enumerate((False, False, True, False)):
                before = {name: tensor.clone() for name, tensor in way.state.items()}
                for index, buffer in enumerate(way.buffers):
                    buffer.copy_(
                        torch.randn(
                            buffer.numel(),
                            generator=torch.Generator().manual_seed(10 * step + rank),
                        )
                    )
                    if skipped and index == rank == 0:
                        buffer[5] = float("inf")
                    way.start(index)
                for index in range(len(flats)):
                    way.finish(index)
                way.carried.end_step(skipped=skipped)
                same = all(torch.equal(before[name], tensor) for name, tensor in way.state.items())
                if step > 1:
                    said.append(f"{type(way).__name__} {revocable} {'same' if same else 'changed'}")
    return said


def test_buckets_take_back_what_a_skipped_step_made(pool):
    """A22: errors, PowerSGD's factors and its count. Where no step is ever skipped, nothing is kept twice."""
    for said in pool.run(2, buckets):
        assert said[:4] == [
            "QuantisedBuckets True same",
            "QuantisedBuckets True changed",
            "PowerSGDBuckets True same",
            "PowerSGDBuckets True changed",
        ]
        assert [text.split()[-1] for text in said[4:]] == ["changed"] * 4
