"""Parameters that a step leaves unused: by every rank (the optimizer must skip them) and by some ranks only (the others' gradient
counts)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from plait.verify.parity import engine_trace, full_tensor_on_cpu
from tests.parity import cases
from tests.parity.data_parallel import assert_same, materialised, plain_trace, settings
from tests.parity.mean_losses import close


def steps(micro_batches):
    """Step 0: nobody uses the side branch; step 1: only the last micro-batch does; step 2: all do; step 3: nobody again."""
    plan: list[list[dict[str, Any]]] = []
    for step, pieces in enumerate(cases.ragged_steps(micro_batches, steps=4, keys=())):
        uses = {
            0: lambda i: False,
            1: lambda i: i == micro_batches - 1,
            2: lambda i: True,
            3: lambda i: False,
        }[step]
        plan.append([{**piece, "side": uses(index)} for index, piece in enumerate(pieces)])
    return plan


def train(rank, world, config):
    """Runs in a worker."""
    engine = plait.initialize(cases.build("plain", tied=True), config, loss_fn=plait.causal_lm_loss)
    dropped = {
        **cases.ragged_steps(1, steps=1, keys=())[0][0],
        "side": True,
    }  # what it uses is not used by step 0
    engine.backward(plait.causal_lm_loss(engine(dropped["input_ids"], side=True), dropped)[0])
    engine.zero_grad()
    trace = engine_trace(engine, steps(world * config["gradient_accumulation_steps"]))
    return trace if rank == 0 else None


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unused_parameters_are_skipped(pool, stage, accumulation):
    """Gradients are None exactly where one process leaves them None."""
    found = pool.run(2, train, settings(2, stage, 1, accumulation))[0]
    wanted = plain_trace(materialised("plain", tied=True), steps(2 * accumulation))
    assert wanted.gradients[0]["blocks.0.side.weight"] is None
    assert wanted.gradients[1]["blocks.0.side.weight"] is not None
    assert_same(wanted, found)


SGD = {"lr": 0.05, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}


def sgd(parameters):
    """The optimizer of `SGD`, in plain torch."""
    return torch.optim.SGD(parameters, **SGD, foreach=False, fused=False)


@pytest.mark.parametrize("stage", [0, 2])
def test_momentum_of_a_branch_used_later(pool, stage):
    """The branch's first gradient comes in the second step."""
    config = settings(2, stage, 1, 1) | {"optimizer": {"type": "SGD", "params": SGD}}
    found = pool.run(2, train, config)[0]
    wanted = plain_trace(materialised("plain", tied=True), steps(2), optimizer=sgd)
    assert_same(wanted, found)


Gradients = list[dict[str, torch.Tensor | None]]


def mean_of(model, piece):
    """Mean over the targets of a micro-batch."""
    total, weight = plait.causal_lm_loss(model(piece["input_ids"], side=piece["side"]), piece)
    return total / max(int(weight), 1)


def own_loop(rank, world, config):
    """Gradients and, last, weights. Runs in a worker."""
    count = config["gradient_accumulation_steps"]
    model = cases.build("plain", tied=True)
    sharded = plait.parallelize(model, config)
    optimizer = cases.adamw(list(model.parameters()))
    gradients: Gradients = []
    for index, step in enumerate(steps(world * count)):
        model.blocks[2].requires_grad_(index != 1)
        *others, last = step[rank * count : (rank + 1) * count]
        for piece in others:
            with sharded.accumulate():
                (mean_of(model, piece) / count).backward()
        (mean_of(model, last) / count).backward()
        if index == 2:  # a second backward, which leaves the branch out
            mean_of(model, {**last, "side": False}).backward()
        gradients.append(
            {
                name: None if p.grad is None else full_tensor_on_cpu(p.grad)
                for name, p in model.named_parameters()
            }
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=index != 2)
    return [*gradients, {name: full_tensor_on_cpu(p) for name, p in model.named_parameters()}]


def alone(count):
    """The same in one process."""
    model = materialised("plain", tied=True)
    optimizer = cases.adamw(list(model.parameters()))
    gradients: Gradients = []
    for index, step in enumerate(steps(2 * count)):
        model.blocks[2].requires_grad_(index != 1)
        for piece in step:
            (mean_of(model, piece) / len(step)).backward()
        if index == 2:
            for piece in (step[count - 1], step[-1]):
                (mean_of(model, {**piece, "side": False}) / 2).backward()
        gradients.append(
            {
                name: None if p.grad is None else p.grad.clone()
                for name, p in model.named_parameters()
            }
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=index != 2)
    return [*gradients, {name: p.detach() for name, p in model.named_parameters()}]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_own_loop_skips_unused_parameters(pool, stage, accumulation):
    """Gradients are those of one process, None and zeros included."""
    wanted = alone(accumulation)
    side, norm = "blocks.0.side.weight", "blocks.2.norm.weight"
    assert [step[side] is None for step in wanted[:-1]] == [True, False, False, False]
    assert wanted[1][norm] is None and wanted[3][side] is not None and not wanted[3][side].any()
    for found in pool.run(2, own_loop, settings(2, stage, 1, accumulation)):
        for step, (gradients, expected) in enumerate(zip(found, wanted, strict=True)):
            assert {n for n, g in gradients.items() if g is None} == {
                n for n, g in expected.items() if g is None
            }, step
            close(gradients, expected)
