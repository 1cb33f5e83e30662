"""DeepSpeed's three calls and a loop of one's own, against one process."""

import pytest
import torch
import torch.distributed as dist

import plait
from plait.verify.parity import full_tensor_on_cpu
from tests.parity import cases, tensor_parallel
from tests.parity.data_parallel import CLIPPING, materialised, settings
from tests.parity.mean_losses import close, mean_loss

STEPS, ACCUMULATION = 3, 2


def reference(world, *, weighted, clipping):
    """One process: the mean of means, or the weighted mean, over all micro-batches of a step."""
    model = materialised("plain", tied=True)
    optimizer = cases.adamw(list(model.parameters()))
    for step in cases.ragged_steps(world * ACCUMULATION, steps=STEPS, keys=()):
        everything = sum(mean_loss(model, piece)[1] for piece in step)
        for piece in step:
            loss, weight = mean_loss(model, piece)
            (loss * weight / everything if weighted else loss / len(step)).backward()
        if clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def share(rank, step):
    """This rank's micro-batches."""
    return step[rank * ACCUMULATION : (rank + 1) * ACCUMULATION]


def three_calls(rank, world, config, weighted):
    """Runs in a worker."""
    engine = plait.initialize(cases.build("plain", tied=True), config)
    for step in cases.ragged_steps(engine.dp_size * ACCUMULATION, steps=STEPS, keys=()):
        for index, piece in enumerate(share(engine.dp_rank, step)):
            assert engine.is_gradient_accumulation_boundary() == (index == ACCUMULATION - 1)
            loss, weight = mean_loss(engine, piece)
            engine.backward(loss, weight=weight) if weighted else engine.backward(loss)
            engine.step()
        assert engine.was_step_applied()
    assert engine.global_steps == STEPS
    return {name: full_tensor_on_cpu(p) for name, p in engine.model.named_parameters()}


def own_loop(rank, world, stage):
    """Runs in a worker: `parallelize`, an optimizer of one's own, `accumulate`, `clip_grad_norm`."""
    model = cases.build("plain", tied=True)
    sharded = plait.parallelize(model, settings(world, stage, 1, ACCUMULATION))
    optimizer = cases.adamw(list(model.parameters()))
    for step in cases.ragged_steps(world * ACCUMULATION, steps=STEPS, keys=()):
        first, last = share(rank, step)
        with sharded.accumulate():
            (mean_loss(model, first)[0] / ACCUMULATION).backward()
        (mean_loss(model, last)[0] / ACCUMULATION).backward()
        norm = sharded.clip_grad_norm(1e6)  # far above it: nothing changes, the norm neither
        assert torch.equal(sharded.clip_grad_norm(CLIPPING), norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: full_tensor_on_cpu(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("weighted", [False, True], ids=["mean of means", "weighted"])
def test_three_calls(pool, stage, weighted):
    """Both normalisations."""
    wanted = reference(2, weighted=weighted, clipping=CLIPPING)
    for found in pool.run(2, three_calls, settings(2, stage, 1, ACCUMULATION), weighted):
        close(found, wanted)


def test_three_calls_of_ranks_that_share_a_batch(pool):
    """A mean over the ranks that have batches of their own: here one. Clipping would hide a factor."""
    config = tensor_parallel.settings(2, 2, 0, 1, ACCUMULATION, **tensor_parallel.plan("plain")) | {
        "gradient_clipping": 0
    }
    for found in pool.run(2, three_calls, config, False):
        close(found, reference(1, weighted=False, clipping=0))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_own_loop(pool, stage):
    """Gradients are means over ranks, as DistributedDataParallel's."""
    wanted = reference(2, weighted=False, clipping=CLIPPING)
    for found in pool.run(2, own_loop, stage):
        close(found, wanted)


def retained(rank, world, stage):
    """Two losses of one forward. Runs in a worker."""
    engine = plait.initialize(cases.build("plain", tied=True), settings(world, stage, 1, 1))
    for step in cases.ragged_steps(world, steps=STEPS, keys=()):
        logits = engine(step[rank]["input_ids"]).logits
        engine.backward(logits.square().mean(), retain_graph=True)
        engine.backward(logits.logsumexp(-1).mean())
        engine.step()
    return {name: full_tensor_on_cpu(p) for name, p in engine.model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_backwards_of_one_forward(pool, stage):
    model = materialised("plain", tied=True)
    optimizer = cases.adamw(list(model.parameters()))
    for step in cases.ragged_steps(2, steps=STEPS, keys=()):
        for piece in step:
            logits = model(piece["input_ids"]).logits
            ((logits.square().mean() + logits.logsumexp(-1).mean()) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
    for found in pool.run(2, retained, stage):
        close(found, {name: p.detach() for name, p in model.named_parameters()})


def refusals(rank, world):
    """Runs in a worker: what must be refused, and what must be adopted."""
    said = []
    config = settings(world, 1, 1, 1)
    wrapped = torch.nn.parallel.DistributedDataParallel(
        cases.build("plain", tied=False, device="cpu")
    )
    for model in (wrapped, torch.nn.ModuleDict({"inner": wrapped})):
        try:
            plait.initialize(model, config)
        except plait.PlaitError as error:
            said.append(str(error))
    group = dist.group.WORLD
    engine = plait.initialize(cases.build("plain", tied=False), config)
    assert dist.group.WORLD is group
    engine.close()
    assert dist.is_initialized(), "an adopted group is the user's to destroy"
    return said


def test_wrapped_models_are_refused_and_groups_adopted(pool):
    """MISSION P1 and P2."""
    first, second = pool.run(2, refusals)[0]
    assert "already wrapped in DistributedDataParallel" in first and "model.module" in first
    assert "already sharded or wrapped" in second
