"""A skipped step changes only the loss scale: weights, moments, schedule and residuals stay."""

from __future__ import annotations

import pytest
import torch

import plait
from plait._torch.tensors import local_tensor
from plait.comm.compress import POWERSGD_START, is_residual
from plait.losses.loss import WeightedLoss
from tests.parity import cases
from tests.parity.data_parallel import settings
from tests.parity.full_tensors import names_of_differences

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
SCHEDULE = {
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 0.01}}
}
FEEDBACK = {"compress_gradients": "int8", "error_feedback": True}


def state_of(engine):
    """Return copies of this rank's tensors that a step changes."""
    state = {}
    for index, parameter in enumerate(engine.model.parameters()):
        state[f"weight {index}"] = local_tensor(parameter.detach()).clone()
    for index, moments in enumerate(engine.optimizer.state.values()):
        for name, value in moments.items():
            state[f"moment {index} {name}"] = local_tensor(value).clone()
    for name, tensor in engine.hooks.state().items():
        state[f"compression {name}"] = tensor.clone()
    state["random"] = torch.get_rng_state()
    state["rate"] = torch.tensor([*engine.get_lr(), engine.lr_scheduler.last_epoch])
    return state


def skip_a_step(rank, world, stage, compression, skipped):
    """Train until one step after the skipped one. Runs on every rank.

    In the skipped step the last rank's first micro-batch has an infinite gradient. Returns the
    names of the state that the step changed.
    """
    # Compression at stage 0 needs full precision, where non-finite steps are skipped on request.
    sections = FP16 if stage else {"faults": {"non_finite": "skip"}}
    config = settings(world, stage, 1, 2, **sections, **SCHEDULE)
    config["parallel"] |= compression
    engine = cases.engine(cases.build("plain", tied=True, dtype=torch.float32), config)
    calls = 0

    def infinite_once(output, batch):
        nonlocal calls
        total, weight = plait.causal_lm_loss(output, batch)
        calls += 1
        return total * 1e38 * 1e38 if calls == 1 and rank == world - 1 else total, weight

    changed = []
    for index, step in enumerate(cases.ragged_steps(world * 2, steps=skipped + 2, keys=())):
        batch = [{**micro_batch, "side": True} for micro_batch in step[rank * 2 : rank * 2 + 2]]
        before = state_of(engine)
        if index == skipped:
            engine.loss_fn = WeightedLoss(infinite_once, plait.causal_lm_loss.weight)
        assert engine.train_batch(batch).skipped == (index == skipped)
        engine.loss_fn = plait.causal_lm_loss
        if index == skipped:
            residuals = [n for n in before if n.startswith("compression") and is_residual(n)]
            assert any(before[name].any() for name in residuals)
            if stage:
                # Residuals are in units of the loss scale, which was halved.
                for name in residuals:
                    before[name] /= 2
            changed = names_of_differences(before, state_of(engine))
    return changed


@pytest.mark.parametrize(
    ("stage", "compression", "skipped"),
    [
        pytest.param(0, FEEDBACK, 2, id="0"),
        # Compression starts after some uncompressed steps.
        pytest.param(0, {"compress_gradients": "powersgd"}, POWERSGD_START + 2, id="powersgd"),
        pytest.param(1, FEEDBACK, 2, id="1"),
        pytest.param(3, FEEDBACK, 2, id="3"),
    ],
)
def test_a_skipped_step_changes_nothing(pool, stage, compression, skipped):
    """Other micro-batches had been reduced before one rank overflowed (A22).

    The residuals of compression, PowerSGD's factors and its step count stay, too.
    """
    assert pool.run(2, skip_a_step, stage, compression, skipped) == [[], []]
