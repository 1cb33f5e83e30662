"""Parameters that a step leaves unused.

The optimizer skips those that no rank uses. If some ranks use one, their gradient counts.
"""

from __future__ import annotations

import pytest
import torch

import plait
from plait.verify.parity import engine_trace
from tests.parity import cases
from tests.parity.data_parallel import assert_same, materialised, plain_trace, settings
from tests.parity.full_tensors import assert_gradients_close, full_gradients, full_weights
from tests.parity.mean_losses import close

SIDE = "blocks.0.side.weight"


def steps(micro_batches):
    """Return four steps.

    No micro-batch of the first and last uses the side branch, only the last micro-batch of the
    second, and all of the third.
    """
    plan = cases.ragged_steps(micro_batches, steps=4, keys=())
    for step, micro_batches_of_step in enumerate(plan):
        for micro_batch in micro_batches_of_step:
            micro_batch["side"] = step == 2
    plan[1][-1]["side"] = True
    return plan


def train(rank, world, config):
    """Runs on every rank."""
    engine = cases.engine(cases.build("plain", tied=True), config)
    # Gradients that are dropped do not make parameters used.
    batch = cases.ragged_steps(1, steps=1, keys=())[0][0]
    engine.backward(plait.causal_lm_loss(engine(batch["input_ids"], side=True), batch)[0])
    engine.zero_grad()
    trace = engine_trace(engine, steps(world * config["gradient_accumulation_steps"]))
    return trace if rank == 0 else None


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unused_parameters_are_skipped(pool, stage, accumulation):
    """Gradients are None for the parameters for which one process has None."""
    actual = pool.run(2, train, settings(2, stage, 1, accumulation))[0]
    expected = plain_trace(materialised("plain", tied=True), steps(2 * accumulation))
    assert expected.gradients[0][SIDE] is None
    assert expected.gradients[1][SIDE] is not None
    assert_same(expected, actual)


SGD = {"lr": 0.05, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}


def sgd(parameters):
    return torch.optim.SGD(parameters, **SGD, foreach=False, fused=False)


@pytest.mark.parametrize("stage", [0, 2])
def test_momentum_of_a_branch_used_later(pool, stage):
    """The first gradient of the branch is from the second step."""
    config = settings(2, stage, 1, 1) | {"optimizer": {"type": "SGD", "params": SGD}}
    actual = pool.run(2, train, config)[0]
    expected = plain_trace(materialised("plain", tied=True), steps(2), optimizer=sgd)
    assert_same(expected, actual)


def mean_loss(model, micro_batch, *, side=None):
    """Return the mean over targets. `side` replaces the setting of the micro-batch."""
    use_side = micro_batch["side"] if side is None else side
    total, weight = plait.causal_lm_loss(
        model(micro_batch["input_ids"], side=use_side), micro_batch
    )
    return total / max(int(weight), 1)


def own_loop(model, backward, micro_batches):
    """Train in a user's loop, and return the gradients of each step and the weights.

    The third block is frozen in the second step. The third step has a further backward without the
    branch, and keeps its gradients as zeros for the fourth.

    Args:
        model: The model.
        backward: Function that runs the backwards of a step's micro-batches, and of the further
            backward if its second argument is true.
        micro_batches: Micro-batches of all ranks per step.
    """
    optimizer = cases.adamw(list(model.parameters()))
    gradients = []
    for index, step in enumerate(steps(micro_batches)):
        model.blocks[2].requires_grad_(index != 1)
        backward(step, index == 2)
        gradients.append(full_gradients(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=index != 2)
    return gradients, full_weights(model)


def train_in_own_loop(rank, world, config):
    """Runs on every rank."""
    count = config["gradient_accumulation_steps"]
    model = cases.build("plain", tied=True)
    sharded = plait.parallelize(model, config)

    def backward(step, again):
        *others, last = step[rank * count : (rank + 1) * count]
        for micro_batch in others:
            with sharded.accumulate():
                (mean_loss(model, micro_batch) / count).backward()
        (mean_loss(model, last) / count).backward()
        if again:
            mean_loss(model, last, side=False).backward()

    return own_loop(model, backward, world * count)


def train_alone(count):
    """Train in one process on the micro-batches of two ranks."""
    model = materialised("plain", tied=True)

    def backward(step, again):
        for micro_batch in step:
            (mean_loss(model, micro_batch) / len(step)).backward()
        if again:
            for micro_batch in (step[count - 1], step[-1]):
                (mean_loss(model, micro_batch, side=False) / 2).backward()

    return own_loop(model, backward, 2 * count)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_own_loop_skips_unused_parameters(pool, stage, accumulation):
    """Gradients are those of one process, including None and zeros."""
    expected, expected_weights = train_alone(accumulation)
    assert [gradients[SIDE] is None for gradients in expected] == [True, False, False, False]
    assert expected[1]["blocks.2.norm.weight"] is None
    assert not expected[3][SIDE].any()
    config = settings(2, stage, 1, accumulation)
    for actual, weights in pool.run(2, train_in_own_loop, config):
        for gradients, expected_gradients in zip(actual, expected, strict=True):
            assert_gradients_close(gradients, expected_gradients)
        close(weights, expected_weights)
