"""Your own training loop over what has to see its steps: pipelines, float16, files, and compression that the steps decide."""

from __future__ import annotations

import pytest
import torch

import plait
from plait.errors import InputError
from plait.verify.parity import full_tensor_on_cpu
from tests.parity import cases, tensor_parallel
from tests.parity.data_parallel import CLIPPING, materialised, settings
from tests.parity.digests import build

STEPS, COUNT = 3, 4


def mean_of(output, piece):
    """Mean over a micro-batch's targets."""
    total, weight = plait.causal_lm_loss(output, piece)
    return total / max(int(weight), 1)


def mine(sharded, step):
    """This data-parallel rank's micro-batches."""
    begin = sharded.mesh.dp_index * COUNT
    return step[begin : begin + COUNT]


def loop(rank, world, config):
    """(weights here, this rank's losses, norms). Runs in a worker."""
    model = cases.build("plain", tied=True)
    sharded = plait.parallelize(model, config)
    optimizer = cases.adamw([p for p in model.parameters() if p.requires_grad])
    losses, norms = [], []
    for step in cases.ragged_steps(sharded.mesh.layout.dp * COUNT, steps=STEPS, keys=()):
        losses.append(float(sharded.forward_backward(mine(sharded, step), mean_of)))
        outcome = sharded.step(optimizer)
        assert not outcome.skipped and all(p.grad is None for p in model.parameters())
        norms.append(float(outcome.grad_norm))
    return {name: full_tensor_on_cpu(p) for name, p in model.named_parameters()}, losses, norms


def parallel(pp=1, tp=1, stage=0, dp=1, schedule=None):
    """A configuration file of pp x tp x dp processes."""
    config = settings(dp, stage, 1, COUNT)
    config["parallel"] |= {"pp": pp, "tp": tp} | (tensor_parallel.plan("plain") if tp > 1 else {})
    if schedule is not None:
        config["parallel"]["pipeline"] = {"schedule": schedule}
    return config


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, {"dp": 2}),
        (2, {"dp": 2, "stage": 3}),
        (2, {"tp": 2}),
        (2, {"pp": 2}),
        (4, {"pp": 2, "dp": 2, "stage": 1, "schedule": "gpipe"}),
        (4, {"pp": 2, "tp": 2}),
    ],
)
def test_a_loop_is_one_process(pool, world, layout):
    """The mean of means over micro-batches and ranks, clipped; the pipeline too, whose stages no loop could call."""
    dp = layout.get("dp", 1)
    wanted = one_process(dp)
    for weights, losses, norms in pool.run(world, loop, parallel(**layout)):
        for name, tensor in weights.items():
            torch.testing.assert_close(
                tensor,
                wanted[0][name],
                rtol=0,
                atol=1e-12,
                msg=lambda text, name=name: f"{name}: {text}",
            )
        assert any(losses == pytest.approx(found, rel=1e-12) for found in wanted[1])
        assert norms == pytest.approx(wanted[2], rel=1e-12)


def one_process(dp):
    """(weights, losses of each data-parallel rank, norms) in plain torch."""
    model = materialised("plain", tied=True)
    optimizer, losses, norms = cases.adamw(list(model.parameters())), [[] for _ in range(dp)], []
    for step in cases.ragged_steps(dp * COUNT, steps=STEPS, keys=()):
        for rank in range(dp):
            found = [
                mean_of(model(piece["input_ids"]), piece)
                for piece in step[rank * COUNT : (rank + 1) * COUNT]
            ]
            losses[rank].append(float(sum(found).detach() / COUNT))
            sum(loss / len(step) for loss in found).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, losses, norms


def both(rank, world, config, folder):
    """(steps that the engine skipped, that the loop skipped); the bits of both runs are the same. Runs in a worker."""
    steps = cases.ragged_steps(world * 2, steps=4)
    engine = plait.initialize(
        build("gpt2", torch.float32, dropout=False), config, optimizer=cases.adamw
    )
    skipped: tuple[list[bool], list[bool]] = ([], [])
    for step in steps:
        for piece in step[rank * 2 : (rank + 1) * 2]:
            engine.backward(mean_of(engine(piece["input_ids"]), piece))
            engine.step()
        skipped[0].append(not engine.was_step_applied())
    model = build("gpt2", torch.float32, dropout=False)
    if folder:
        files = {"device": "nvme", "nvme_path": folder, "buffer_size": 6000}
        config = {
            **config,
            "zero_optimization": {"stage": 3, "offload_optimizer": files, "offload_param": files},
        }
    sharded = plait.parallelize(model, config)
    optimizer = cases.adamw(list(model.parameters()))
    with pytest.raises(
        InputError, match=r"call sharded.step\(optimizer\) instead of optimizer.step\(\)"
    ):
        optimizer.step()
    for step in steps:
        first, last = step[rank * 2 : (rank + 1) * 2]
        with sharded.accumulate():
            sharded.backward(mean_of(sharded(first["input_ids"]), first) / 2)
        sharded.backward(mean_of(model(last["input_ids"]), last) / 2)
        skipped[1].append(sharded.step(optimizer).skipped)
    with pytest.raises(InputError, match="a second optimizer would find no gradients"):
        sharded.step(cases.adamw(list(model.parameters())))
    with pytest.raises(InputError, match="sharded.step clips"):
        sharded.clip_grad_norm(1.0)
    for (name, one), (_, other) in zip(
        engine.model.named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(full_tensor_on_cpu(one), full_tensor_on_cpu(other)), name
    assert sharded.loss_scale == engine.sharded.loss_scale
    with pytest.raises(InputError, match=r"loss.backward\(\)"):
        mean_of(sharded(steps[0][rank]["input_ids"]), steps[0][rank]).backward()
    sharded.close()
    return skipped


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_float16(pool, stage):
    """Steps with an overflow are skipped on every rank, and the scale goes on as the engine's."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}
    for engine, own in pool.run(2, both, settings(2, stage, 1, 2, **fp16), ""):
        assert engine == own and any(own) and not all(own)


def test_parameters_and_states_in_files(pool, tmp_path):
    for engine, own in pool.run(2, both, settings(2, 3, 1, 2), str(tmp_path)):
        assert engine == own == [False] * 4


def two_optimizers(rank, world, stage):
    """Each steps half of the parameters; its gradients are clipped and dropped by themselves. Runs in a worker."""
    model = cases.build("plain", tied=True)
    sharded = plait.parallelize(model, settings(world, stage, 1, 1) | {"gradient_clipping": 0})
    parameters = list(model.parameters())
    optimizers = [cases.adamw(parameters[::2]), cases.adamw(parameters[1::2])]
    for step in cases.ragged_steps(world, steps=2, keys=()):
        sharded.backward(mean_of(sharded(step[rank]["input_ids"]), step[rank]))
        for optimizer in optimizers:
            sharded.step(optimizer)
        assert all(p.grad is None for p in parameters)
    return {name: full_tensor_on_cpu(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 3])
def test_two_optimizers(pool, stage):
    model = materialised("plain", tied=True)
    optimizer = cases.adamw(list(model.parameters()))
    for step in cases.ragged_steps(2, steps=2, keys=()):
        sum(mean_of(model(piece["input_ids"]), piece) / 2 for piece in step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in pool.run(2, two_optimizers, stage):
        for name, wanted in model.named_parameters():
            torch.testing.assert_close(found[name], wanted.detach(), rtol=0, atol=1e-12)


def after_a_failure(rank, world, stage):
    """A plain loop that goes on after exceptions in the middle of a step. Runs in a worker."""
    model = materialised("plain", tied=True)
    model.out_of_buckets = torch.nn.Parameter(
        torch.ones(2, dtype=torch.float64), requires_grad=False
    )
    sharded = plait.parallelize(model, settings(world, stage, 1, 2))
    optimizer = cases.adamw(list(model.parameters()))
    mine, calls = cases.ragged_steps(world * 2, steps=1, keys=())[0][rank * 2 : (rank + 1) * 2], []

    def failing(output, piece):
        calls.append(piece)
        if len(calls) == 2:
            raise ValueError("the second micro-batch")
        return mean_of(output, piece)

    with pytest.raises(ValueError, match="second"):
        sharded.forward_backward(mine, failing)

    def first_fails():
        with sharded.accumulate():
            mean_of(model(mine[0]["input_ids"]), mine[0]).backward()
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        first_fails()
    sharded.forward_backward(mine, mean_of)
    optimizer.step()
    found = {name: full_tensor_on_cpu(p) for name, p in model.named_parameters()}
    if not stage:
        model.out_of_buckets.requires_grad_(True).grad = torch.ones(2, dtype=torch.float64)
        with pytest.raises(
            InputError, match="out_of_buckets .* was frozen when plait.parallelize was called"
        ):
            optimizer.step()
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_that_failed_leaves_nothing_behind(pool, stage):
    model = materialised("plain", tied=True)
    step = cases.ragged_steps(4, steps=1, keys=())[0]
    sum(mean_of(model(piece["input_ids"]), piece) / 4 for piece in step).backward()
    cases.adamw(list(model.parameters())).step()
    for found in pool.run(2, after_a_failure, stage):
        for name, wanted in model.named_parameters():
            torch.testing.assert_close(found[name], wanted.detach(), rtol=0, atol=1e-12)


def step_in_a_hook(rank, world, stage):
    """The error of a loop whose gradient hooks call an optimizer per parameter. Runs in a worker."""
    model = materialised("plain", tied=True)
    sharded = plait.parallelize(model, settings(world, stage, 1, 1))

    def update(parameter):
        cases.adamw([parameter]).step()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    batch = cases.ragged_steps(world, steps=1, keys=())[0][rank]
    with pytest.raises(InputError) as caught:
        mean_of(model(batch["input_ids"]), batch).backward()
    sharded.close()
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_inside_of_a_backward_is_refused(pool, stage):
    """Parameters that no rank used would be decayed, and stage 0 has not reduced anything."""
    for message in pool.run(2, step_in_a_hook, stage):
        assert message.startswith("optimizer.step() was called inside loss.backward()")
