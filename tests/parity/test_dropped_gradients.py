"""`zero_grad` between the micro-batches of a step drops gradients that are not reduced yet, as in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import plait
from plait.errors import InputError
from plait.verify.parity import full_tensor_on_cpu
from tests.parity import cases
from tests.parity.data_parallel import materialised, settings
from tests.parity.mean_losses import Weights, close
from tests.pool import Pool

Loss = Callable[..., torch.Tensor]
"""Function (micro-batch number, side branch) -> loss of the micro-batch."""

FULL_STEP = ["inside", "last", "step"]

PROGRAMS = {
    "accumulates": ["inside side", *FULL_STEP, "inside", "last side", "step"],
    "gives up": ["inside side", "zero", *FULL_STEP, "last side", "step"],
    "gives up twice": ["inside", "inside side", "zero", "inside", "zero", *FULL_STEP],
    "zeroes in place": ["inside side", "zero in place", *FULL_STEP, "last side", "step"],
    "zeroes in place without foreach": ["inside side", "zero one by one", *FULL_STEP],
    "model.zero_grad": ["inside side", "model.zero_grad", *FULL_STEP],
    "p.grad = None": ["inside side", "p.grad = None", *FULL_STEP],
    "model.zero_grad in place": ["inside side", "model.zero_grad in place", *FULL_STEP],
    "between forward and backward": ["inside side", "last after zero", "step"],
    "after a forward": ["last side", "last after zero", "step"],
    "steps after zero": ["inside", "zero", "step", *FULL_STEP],
    "reads": ["inside side", "read", *FULL_STEP],
    "after a reduced backward": ["last side", "inside", "zero", *FULL_STEP],
    "in place after a reduced backward": ["last", "inside side", "zero in place", *FULL_STEP],
    "adds to a reduced backward": ["last", "inside side", "last", "step"],
    "one of two optimizers": ["inside side", "zero blocks", *FULL_STEP],
}


def run(
    program: list[str], model: Any, loss: Loss, accumulate: Callable[[], Any]
) -> tuple[Weights, list[bool]]:
    """(weights, parameters that have a gradient before each step)."""
    block_parameters = set(model.blocks.parameters())
    optimizers = {
        "blocks": cases.adamw([p for p in model.parameters() if p in block_parameters]),
        "others": cases.adamw([p for p in model.parameters() if p not in block_parameters]),
    }
    parameters = list(model.parameters())
    has_gradient = []
    for number, action in enumerate(program):
        side = "side" in action
        if action.startswith("inside"):
            with accumulate():
                loss(number, side).backward()
        elif action == "last after zero":
            value = loss(number, side)
            model.zero_grad()
            value.backward()
        elif action.startswith("last"):
            loss(number, side).backward()
        elif action == "zero one by one":
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()
        elif action.startswith("zero"):
            for name, optimizer in optimizers.items():
                if action != "zero blocks" or name == "blocks":
                    optimizer.zero_grad(set_to_none=action != "zero in place")
        elif action.startswith("model.zero_grad"):
            model.zero_grad(set_to_none="in place" not in action)
        elif action == "p.grad = None":
            for parameter in model.parameters():
                parameter.grad = None
        elif action == "read":
            assert all(bool(p.grad.isfinite().all()) for p in parameters if p.grad is not None)
        else:
            has_gradient += [parameter.grad is not None for parameter in parameters]
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
    return {name: full_tensor_on_cpu(p) for name, p in model.named_parameters()}, has_gradient


def loss_of(model: Any, world: int, ranks: list[int]) -> Loss:
    """The mean of the ranks' losses."""
    step = cases.ragged_steps(max(map(len, PROGRAMS.values())) * world, steps=1, keys=())[0]

    def loss(number: int, side: bool) -> torch.Tensor:
        losses = []
        for rank in ranks:
            piece = step[number * world + rank]
            total, weight = plait.causal_lm_loss(model(piece["input_ids"], side), piece)
            losses.append(total / max(int(weight), 1))
        return torch.stack(losses).mean()

    return loss


def sharded_runs(
    rank: int, world: int, config: dict[str, Any], programs: list[str]
) -> list[tuple[Weights, list[bool]]]:
    """Runs in a worker."""
    results = []
    for name in programs:
        model = materialised("plain", tied=True)
        sharded = plait.parallelize(model, config)
        loss = loss_of(model, world, [rank])
        results.append(run(PROGRAMS[name], model, loss, sharded.accumulate))
        sharded.close()
    return results


@pytest.mark.parametrize(
    ("world", "stage", "replicas"),
    [(2, 0, 1), (2, 1, 1), (2, 2, 1), (2, 3, 1), (4, 1, 2), (4, 2, 2), (4, 3, 2)],
)
def test_dropped_gradients_stay_dropped(pool: Pool, world: int, stage: int, replicas: int) -> None:
    """The same weights, and the same parameters without a gradient, as one process."""
    programs = list(PROGRAMS)
    if world > 2 or not stage:
        programs = ["accumulates", "gives up", "zeroes in place"]
    found = pool.run(world, sharded_runs, settings(world, stage, replicas, 1), programs)
    for index, name in enumerate(programs):
        model = materialised("plain", tied=True)
        wanted, has_gradient = run(
            PROGRAMS[name], model, loss_of(model, world, list(range(world))), nullcontext
        )
        for rank in range(world):
            weights, rank_has_gradient = found[rank][index]
            assert rank_has_gradient == has_gradient, (name, rank)
            close(weights, wanted)


def reduced_in_another_dtype(rank: int, world: int) -> list[Weights]:
    """Weights after each of three programs with bf16. Runs in a worker."""
    results = []
    for dropped in (["read", "read"], ["inside side", "zero"], ["inside side", "model.zero_grad"]):
        model = materialised("plain", tied=True).float()
        sharded = plait.parallelize(model, settings(world, 1, 1, 1, bf16={"enabled": True}))
        program = [*dropped, *FULL_STEP]
        results.append(run(program, model, loss_of(model, world, [rank]), sharded.accumulate)[0])
        sharded.close()
    return results


def test_sums_of_another_dtype_are_dropped(pool: Pool) -> None:
    """The unreduced sum in float32 is not `grad` of any parameter before torch 2.15."""
    for expected, *found in pool.run(2, reduced_in_another_dtype):
        for weights in found:
            assert all(torch.equal(weights[name], expected[name]) for name in expected)


def changed_gradients(rank: int, world: int, stage: int) -> list[str]:
    """Messages for gradients that are clipped between micro-batches. Runs in a worker."""
    model = materialised("plain", tied=True)
    sharded = plait.parallelize(model, settings(world, stage, 1, 1))
    optimizer = cases.adamw(list(model.parameters()))
    loss = loss_of(model, world, [rank])
    messages = []

    with sharded.accumulate():
        loss(0, True).backward()
    with pytest.raises(InputError) as norm:
        sharded.clip_grad_norm(1.0)
    with pytest.raises(InputError, match=r"inside accumulate\(\) only"):
        optimizer.step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(InputError) as forward:
        loss(1, False)
    messages += [str(norm.value), str(forward.value)]

    # The remedy of the second message.
    optimizer.zero_grad()
    loss(1, False).backward()
    optimizer.step()
    sharded.close()
    return messages


def test_changed_gradients_are_refused(pool: Pool) -> None:
    for norm, forward in pool.run(2, changed_gradients, 1):
        assert norm.startswith("the norm of gradients was requested between the micro-batches")
        assert forward.startswith("a gradient was changed between the micro-batches of a step")


def engine_runs(rank: int, world: int, stage: int) -> Weights:
    """An engine whose user drops the gradients of its model. Runs in a worker."""
    engine = plait.initialize(
        materialised("plain", tied=True), settings(world, stage, 1, 2), optimizer=cases.adamw
    )
    loss = loss_of(engine, world, [rank])
    for number in range(4):
        engine.backward(loss(number, False))
        engine.step()
        if number == 0:
            engine.module.zero_grad()
    return {name: full_tensor_on_cpu(p) for name, p in engine.module.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_of_an_engine_are_dropped(pool: Pool, stage: int) -> None:
    model = materialised("plain", tied=True)
    optimizer = cases.adamw(list(model.parameters()))
    loss = loss_of(model, 2, [0, 1])
    for numbers in ([1], [2, 3]):
        for number in numbers:
            (loss(number, False) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    for weights in pool.run(2, engine_runs, stage):
        close(weights, wanted)
