"""DeepSpeed's three calls and users' own loops, against one process."""

import pytest
import torch
import torch.distributed as dist

import plait
from tests.parity import cases, tensor_parallel
from tests.parity.data_parallel import CLIPPING, materialised, settings
from tests.parity.full_tensors import full_weights
from tests.parity.mean_losses import close, mean_loss
from tests.parity.refusals import message_of

STEPS, ACCUMULATION = 3, 2


def reference(losses_of, micro_batches, *, clipping=CLIPPING):
    """Train in one process on the sum of `losses_of(model, step)`, and return the weights."""
    model = materialised("plain", tied=True)
    optimizer = cases.adamw(list(model.parameters()))
    for step in cases.ragged_steps(micro_batches, steps=STEPS, keys=()):
        sum(losses_of(model, step)).backward()
        if clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


def mean_of_means(model, step):
    return [mean_loss(model, micro_batch)[0] / len(step) for micro_batch in step]


def weighted_mean(model, step):
    """Weigh each micro-batch by its number of targets."""
    losses, weights = zip(*(mean_loss(model, micro_batch) for micro_batch in step), strict=True)
    return [loss * weight / sum(weights) for loss, weight in zip(losses, weights, strict=True)]


def micro_batches_of(rank, step):
    return step[rank * ACCUMULATION : (rank + 1) * ACCUMULATION]


def train_with_three_calls(rank, world, config, weighted):
    """Runs on every rank."""
    engine = plait.initialize(cases.build("plain", tied=True), config)
    for step in cases.ragged_steps(engine.dp_size * ACCUMULATION, steps=STEPS, keys=()):
        for index, micro_batch in enumerate(micro_batches_of(engine.dp_rank, step)):
            assert engine.is_gradient_accumulation_boundary() == (index == ACCUMULATION - 1)
            loss, weight = mean_loss(engine, micro_batch)
            if weighted:
                engine.backward(loss, weight=weight)
            else:
                engine.backward(loss)
            engine.step()
        assert engine.was_step_applied()
    assert engine.global_steps == STEPS
    return full_weights(engine.model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("weighted", [False, True], ids=["mean of means", "weighted"])
def test_three_calls(pool, stage, weighted):
    expected = reference(weighted_mean if weighted else mean_of_means, 2 * ACCUMULATION)
    config = settings(2, stage, 1, ACCUMULATION)
    for weights in pool.run(2, train_with_three_calls, config, weighted):
        close(weights, expected)


def test_three_calls_of_ranks_that_share_a_batch(pool):
    """The mean is over data-parallel ranks, here one. Clipping would hide a factor."""
    config = tensor_parallel.settings(2, 2, 0, 1, ACCUMULATION, **tensor_parallel.plan("plain"))
    config["gradient_clipping"] = 0
    expected = reference(mean_of_means, ACCUMULATION, clipping=0)
    for weights in pool.run(2, train_with_three_calls, config, False):
        close(weights, expected)


def train_in_own_loop(rank, world, stage):
    """Runs on every rank."""
    model = cases.build("plain", tied=True)
    sharded = plait.parallelize(model, settings(world, stage, 1, ACCUMULATION))
    optimizer = cases.adamw(list(model.parameters()))
    for step in cases.ragged_steps(world * ACCUMULATION, steps=STEPS, keys=()):
        first, last = micro_batches_of(rank, step)
        with sharded.accumulate():
            (mean_loss(model, first)[0] / ACCUMULATION).backward()
        (mean_loss(model, last)[0] / ACCUMULATION).backward()
        # A limit far above the norm changes no gradient, and so not the norm of the second call.
        norm = sharded.clip_grad_norm(1e6)
        assert torch.equal(sharded.clip_grad_norm(CLIPPING), norm)
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_own_loop(pool, stage):
    """Gradients are means over ranks, as in DistributedDataParallel."""
    expected = reference(mean_of_means, 2 * ACCUMULATION)
    for weights in pool.run(2, train_in_own_loop, stage):
        close(weights, expected)


def losses_of_one_forward(model, micro_batch):
    logits = model(micro_batch["input_ids"]).logits
    return logits.square().mean(), logits.logsumexp(-1).mean()


def train_with_two_backwards(rank, world, stage):
    """Runs on every rank."""
    engine = plait.initialize(cases.build("plain", tied=True), settings(world, stage, 1, 1))
    for step in cases.ragged_steps(world, steps=STEPS, keys=()):
        first, second = losses_of_one_forward(engine, step[rank])
        engine.backward(first, retain_graph=True)
        engine.backward(second)
        engine.step()
    return full_weights(engine.model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_backwards_of_one_forward(pool, stage):
    def means(model, step):
        return [sum(losses_of_one_forward(model, micro_batch)) / 2 for micro_batch in step]

    expected = reference(means, 2)
    for weights in pool.run(2, train_with_two_backwards, stage):
        close(weights, expected)


def initialize_wrapped_models(rank, world):
    """Return the messages for wrapped models. Runs on every rank."""
    config = settings(world, 1, 1, 1)
    model = cases.build("plain", tied=False, device="cpu")
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    messages = [
        message_of(plait.initialize, wrapped, config),
        message_of(plait.initialize, torch.nn.ModuleDict({"inner": wrapped}), config),
    ]

    group = dist.group.WORLD
    engine = plait.initialize(cases.build("plain", tied=False), config)
    assert dist.group.WORLD is group
    engine.close()
    assert dist.is_initialized(), "the user destroys a process group that was adopted"
    return messages


def test_wrapped_models_are_refused_and_groups_adopted(pool):
    """Covers mission P1 and P2."""
    first, second = pool.run(2, initialize_wrapped_models)[0]
    assert "already wrapped in DistributedDataParallel" in first and "model.module" in first
    assert "already sharded or wrapped" in second
