"""An own training loop whose features act on the steps: pipelines, float16, and files."""

from __future__ import annotations

import pytest
import torch

import plait
from plait.errors import InputError
from plait.verify.parity import full_tensor_on_cpu
from tests.parity import cases, tensor_parallel
from tests.parity.data_parallel import CLIPPING, materialised, settings
from tests.parity.digests import build
from tests.parity.mean_losses import close

STEPS = 3
ACCUMULATION = 4


def mean_loss(output, batch):
    """Return the mean over a micro-batch's targets."""
    total, weight = plait.causal_lm_loss(output, batch)
    return total / max(int(weight), 1)


def weights_of(model):
    return {name: full_tensor_on_cpu(p.detach()) for name, p in model.named_parameters()}


def train(rank, world, config):
    """Return this rank's weights, its losses, and norms. Runs on every rank."""
    model = cases.build("plain", tied=True)
    sharded = plait.parallelize(model, config)
    optimizer = cases.adamw([p for p in model.parameters() if p.requires_grad])
    losses = []
    norms = []
    first = sharded.mesh.dp_index * ACCUMULATION
    for step in cases.ragged_steps(sharded.mesh.layout.dp * ACCUMULATION, steps=STEPS, keys=()):
        micro_batches = step[first : first + ACCUMULATION]
        losses.append(float(sharded.forward_backward(micro_batches, mean_loss)))
        outcome = sharded.step(optimizer)
        assert not outcome.skipped
        assert all(p.grad is None for p in model.parameters())
        norms.append(float(outcome.grad_norm))
    return weights_of(model), losses, norms


def layout(*, pp=1, tp=1, dp=1, stage=0, **pipeline):
    """Return the configuration of pp x tp x dp processes."""
    config = settings(dp, stage, 1, ACCUMULATION)
    config["parallel"] |= {"pp": pp, "tp": tp}
    if tp > 1:
        config["parallel"] |= tensor_parallel.plan("plain")
    if pipeline:
        config["parallel"]["pipeline"] = pipeline
    return config


def one_process(dp):
    """Return weights, losses of each data-parallel rank, and norms of plain torch."""
    model = materialised("plain", tied=True)
    optimizer = cases.adamw(list(model.parameters()))
    losses: list[list[float]] = [[] for _ in range(dp)]
    norms = []
    for step in cases.ragged_steps(dp * ACCUMULATION, steps=STEPS, keys=()):
        for rank in range(dp):
            rank_loss = torch.zeros((), dtype=torch.float64)
            for batch in step[rank * ACCUMULATION : (rank + 1) * ACCUMULATION]:
                rank_loss = rank_loss + mean_loss(model(batch["input_ids"]), batch) / ACCUMULATION
            (rank_loss / dp).backward()
            losses[rank].append(float(rank_loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model), losses, norms


@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (2, {"dp": 2}),
        (2, {"dp": 2, "stage": 3}),
        (2, {"tp": 2}),
        (2, {"pp": 2}),
        (4, {"pp": 2, "dp": 2, "stage": 1, "schedule": "gpipe"}),
        (4, {"pp": 2, "tp": 2}),
    ],
)
def test_a_loop_is_one_process(pool, world, degrees):
    """The loss is a mean over micro-batches and ranks of each micro-batch's mean."""
    expected_weights, expected_losses, expected_norms = one_process(degrees.get("dp", 1))
    for weights, losses, norms in pool.run(world, train, layout(**degrees)):
        # A pipeline stage has only its own weights.
        close(weights, {name: expected_weights[name] for name in weights})
        assert any(losses == pytest.approx(expected, rel=1e-12) for expected in expected_losses)
        assert norms == pytest.approx(expected_norms, rel=1e-12)


def engine_and_loop(rank, world, config, folder):
    """Train with an engine, and in an own loop with the same bits. Runs on every rank.

    Args:
        folder: Folder for the loop's parameters and states. Empty: they stay in memory.

    Returns:
        Which steps the engine skipped, and which the loop.
    """
    steps = [step[rank * 2 : (rank + 1) * 2] for step in cases.ragged_steps(world * 2, steps=4)]
    engine = plait.initialize(
        build("gpt2", torch.float32, dropout=False), config, optimizer=cases.adamw
    )
    engine_skipped = []
    for step in steps:
        for batch in step:
            engine.backward(mean_loss(engine(batch["input_ids"]), batch))
            engine.step()
        engine_skipped.append(not engine.was_step_applied())

    model = build("gpt2", torch.float32, dropout=False)
    if folder:
        files = {"device": "nvme", "nvme_path": folder, "buffer_size": 6000}
        zero = {"stage": 3, "offload_optimizer": files, "offload_param": files}
        config = {**config, "zero_optimization": zero}
    sharded = plait.parallelize(model, config)
    optimizer = cases.adamw(list(model.parameters()))
    message = r"call sharded.step\(optimizer\) instead of optimizer.step\(\)"
    with pytest.raises(InputError, match=message):
        optimizer.step()

    loop_skipped = []
    for first, last in steps:
        with sharded.accumulate():
            sharded.backward(mean_loss(sharded(first["input_ids"]), first) / 2)
        sharded.backward(mean_loss(model(last["input_ids"]), last) / 2)
        loop_skipped.append(sharded.step(optimizer).skipped)
    torch.testing.assert_close(weights_of(model), weights_of(engine.model), rtol=0, atol=0)
    assert sharded.loss_scale == engine.sharded.loss_scale

    with pytest.raises(InputError, match="so a second optimizer would find none"):
        sharded.step(cases.adamw(list(model.parameters())))
    with pytest.raises(InputError, match="sharded.step clips"):
        sharded.clip_grad_norm(1.0)
    batch = steps[0][0]
    with pytest.raises(InputError, match=r"loss.backward\(\)"):
        mean_loss(sharded(batch["input_ids"]), batch).backward()
    sharded.close()
    return engine_skipped, loop_skipped


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_float16(pool, stage):
    """All ranks skip steps with an overflow, and the scale changes as the engine's does."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}
    config = settings(2, stage, 1, 2, **fp16)
    for engine_skipped, loop_skipped in pool.run(2, engine_and_loop, config, ""):
        assert engine_skipped == loop_skipped
        assert set(loop_skipped) == {True, False}


def test_parameters_and_states_in_files(pool, tmp_path):
    config = settings(2, 3, 1, 2)
    for engine_skipped, loop_skipped in pool.run(2, engine_and_loop, config, str(tmp_path)):
        assert engine_skipped == loop_skipped == [False] * 4


def train_with_two_optimizers(rank, world, stage):
    """Give each optimizer half of the parameters, which it clips alone. Runs on every rank."""
    model = cases.build("plain", tied=True)
    sharded = plait.parallelize(model, settings(world, stage, 1, 1, gradient_clipping=0))
    parameters = list(model.parameters())
    optimizers = [cases.adamw(parameters[::2]), cases.adamw(parameters[1::2])]
    for step in cases.ragged_steps(world, steps=2, keys=()):
        sharded.backward(mean_loss(sharded(step[rank]["input_ids"]), step[rank]))
        for optimizer in optimizers:
            sharded.step(optimizer)
        assert all(p.grad is None for p in parameters)
    return weights_of(model)


def weights_of_one_process(steps):
    """Train without clipping on the mean of micro-batches' means."""
    model = materialised("plain", tied=True)
    optimizer = cases.adamw(list(model.parameters()))
    for step in steps:
        for batch in step:
            (mean_loss(model(batch["input_ids"]), batch) / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


@pytest.mark.parametrize("stage", [0, 3])
def test_two_optimizers(pool, stage):
    expected = weights_of_one_process(cases.ragged_steps(2, steps=2, keys=()))
    for weights in pool.run(2, train_with_two_optimizers, stage):
        close(weights, expected)


def train_after_exceptions(rank, world, stage):
    """Train in a loop that catches exceptions in the middle of a step. Runs on every rank."""
    model = materialised("plain", tied=True)
    frozen = torch.nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
    model.outside_of_buckets = frozen
    sharded = plait.parallelize(model, settings(world, stage, 1, 2))
    optimizer = cases.adamw(list(model.parameters()))
    micro_batches = cases.ragged_steps(world * 2, steps=1, keys=())[0][rank * 2 : (rank + 1) * 2]
    calls = []

    def failing_loss(output, batch):
        calls.append(batch)
        if len(calls) == 2:
            raise ValueError("the second micro-batch")
        return mean_loss(output, batch)

    with pytest.raises(ValueError, match="second"):
        sharded.forward_backward(micro_batches, failing_loss)

    def fail_inside_accumulate():
        with sharded.accumulate():
            first = micro_batches[0]
            mean_loss(model(first["input_ids"]), first).backward()
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail_inside_accumulate()

    sharded.forward_backward(micro_batches, mean_loss)
    optimizer.step()
    weights = weights_of(model)
    if not stage:
        model.outside_of_buckets.requires_grad_(True).grad = torch.ones(2, dtype=torch.float64)
        message = "outside_of_buckets .* was frozen when plait.parallelize was called"
        with pytest.raises(InputError, match=message):
            optimizer.step()
    del weights["outside_of_buckets"]
    return weights


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_that_failed_leaves_nothing_behind(pool, stage):
    expected = weights_of_one_process(cases.ragged_steps(4, steps=1, keys=()))
    for weights in pool.run(2, train_after_exceptions, stage):
        close(weights, expected)


def step_in_a_hook(rank, world, stage):
    """Return the error of gradient hooks that step an optimizer per parameter.

    Runs on every rank.
    """
    model = materialised("plain", tied=True)
    sharded = plait.parallelize(model, settings(world, stage, 1, 1))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: cases.adamw([p]).step())
    batch = cases.ragged_steps(world, steps=1, keys=())[0][rank]
    with pytest.raises(InputError) as error:
        mean_loss(model(batch["input_ids"]), batch).backward()
    sharded.close()
    return str(error.value)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_inside_of_a_backward_is_refused(pool, stage):
    """It would decay parameters that no rank used, and stage 0 has not reduced anything."""
    for message in pool.run(2, step_in_a_hook, stage):
        assert message.startswith("optimizer.step() was called inside loss.backward()")


def move_between_steps(rank, world, config):
    """Return the weights with and without calls of `model.to`. Runs on every rank."""
    weights = []
    for moves in (False, True):
        model = cases.build("plain", tied=True)
        sharded = plait.parallelize(model, config)
        optimizer = cases.adamw(list(model.parameters()))
        for step in cases.ragged_steps(world, steps=STEPS, keys=()):
            if moves:
                model.to(sharded.device).to(torch.float64)
            mean_loss(model(step[rank]["input_ids"]), step[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(weights_of(model))
    return weights


def test_a_model_may_be_moved_to_its_device(pool):
    """torch swaps shards that it moves, which a weak reference to a shard prevents."""
    for expected, weights in pool.run(2, move_between_steps, layout(dp=2, stage=3)):
        close(weights, expected, atol=0)
