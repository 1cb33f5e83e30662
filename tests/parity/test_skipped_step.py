"""A skipped step changes only the loss scale: weights, moments, schedule and residuals stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import plait
from plait._torch.tensors import local_tensor
from plait.comm.all_reduce import Flat
from plait.comm.compress import PowerSGDBuckets, QuantisedBuckets
from plait.losses.loss import WeightedLoss
from tests.parity import cases
from tests.parity.data_parallel import settings
from tests.parity.full_tensors import names_of_differences

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
SCHEDULE = {
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 0.01}}
}
COMPRESSION = {"compress_gradients": "int8", "error_feedback": True}


def state_of(engine):
    """Return copies of this rank's tensors that a step changes."""
    state = {}
    for index, parameter in enumerate(engine.model.parameters()):
        state[f"weight {index}"] = local_tensor(parameter.detach()).clone()
    for index, moments in enumerate(engine.optimizer.state.values()):
        for name, value in moments.items():
            state[f"moment {index} {name}"] = local_tensor(value).clone()
    for name, residual in engine.hooks.state().items():
        state[f"residual {name}"] = residual.clone()
    state["random"] = torch.get_rng_state()
    state["rate"] = torch.tensor([*engine.get_lr(), engine.lr_scheduler.last_epoch])
    return state


def skip_the_third_step(rank, world, stage):
    """Train four steps. In the third the last rank's first micro-batch has an infinite gradient.

    Runs on every rank. Returns the names of the state that the third step changed.
    """
    config = settings(world, stage, 1, 2, **FP16, **SCHEDULE)
    config["parallel"] |= COMPRESSION
    engine = cases.engine(cases.build("plain", tied=True, dtype=torch.float32), config)
    calls = 0

    def infinite_once(output, batch):
        nonlocal calls
        total, weight = plait.causal_lm_loss(output, batch)
        calls += 1
        return total * 1e38 * 1e38 if calls == 1 and rank == world - 1 else total, weight

    changed = []
    for index, step in enumerate(cases.ragged_steps(world * 2, steps=4, keys=())):
        batch = [{**micro_batch, "side": True} for micro_batch in step[rank * 2 : rank * 2 + 2]]
        before = state_of(engine)
        if index == 2:
            engine.loss_fn = WeightedLoss(infinite_once, plait.causal_lm_loss.weight)
        assert engine.train_batch(batch).skipped == (index == 2)
        engine.loss_fn = plait.causal_lm_loss
        if index == 2:
            # Residuals are in units of the loss scale, which was halved.
            residuals = [name for name in before if name.startswith("residual")]
            assert any(before[name].any() for name in residuals)
            for name in residuals:
                before[name] /= 2
            changed = names_of_differences(before, state_of(engine))
    return changed


@pytest.mark.parametrize("stage", [1, 3])
def test_a_skipped_step_changes_nothing(pool, stage):
    """Other micro-batches had been reduced before one rank overflowed (A22)."""
    assert pool.run(2, skip_the_third_step, stage) == [[], []]


def bucket_states(rank, world):
    """Return whether buckets of stage 0 changed their state in a skipped and in a later step.

    Runs on every rank. Results are keyed by class and by whether steps are revocable.
    """
    shapes = ((40, 30), (64, 8))
    flats = [Flat(torch.float32, shapes), Flat(torch.float32, shapes)]
    arguments = (dist.group.WORLD, flats, torch.device("cpu"))

    def step(buckets, index, *, skipped):
        generator = torch.Generator().manual_seed(10 * index + rank)
        for bucket, buffer in enumerate(buckets.buffers):
            buffer.copy_(torch.randn(buffer.numel(), generator=generator))
            if skipped and bucket == rank == 0:
                buffer[5] = float("inf")
            buckets.start(bucket)
        for bucket in range(len(flats)):
            buckets.finish(bucket)
        buckets.carried.end_step(skipped=skipped)

    changes = {}
    for revocable in (True, False):
        kinds: list[Any] = [
            QuantisedBuckets(*arguments, bits=8, feedback=True, revocable=revocable),
            PowerSGDBuckets(*arguments, rank=2, uncompressed_steps=1, revocable=revocable),
        ]
        for buckets in kinds:
            changed = []
            for index, skipped in enumerate((False, False, True, False)):
                before = {name: tensor.clone() for name, tensor in buckets.state.items()}
                step(buckets, index, skipped=skipped)
                changed.append(bool(names_of_differences(before, buckets.state)))
            changes[type(buckets).__name__, revocable] = changed[2:]
    return changes


def test_buckets_restore_their_state_after_a_skipped_step(pool):
    """Residuals, PowerSGD's factors and its count are restored if steps can be skipped (A22)."""
    for changes in pool.run(2, bucket_states):
        assert changes == {
            ("QuantisedBuckets", True): [False, True],
            ("PowerSGDBuckets", True): [False, True],
            ("QuantisedBuckets", False): [True, True],
            ("PowerSGDBuckets", False): [True, True],
        }
