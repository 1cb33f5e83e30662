"""Parameters that are frozen while the model runs for the first time, and trained later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import plait
from plait.errors import InputError
from plait.parallel.data.reducer import Reducer
from plait.verify.parity import engine_trace, full_tensor_on_cpu, reference_trace
from tests.parity import adapted, cases, trainers
from tests.parity.data_parallel import CLIPPING, assert_same, materialised, plain_trace, settings
from tests.parity.mean_losses import close


def freezing_steps(model, steps):
    """Yield steps of which the first and the third train without one block of the model.

    The block is frozen and unfrozen between steps, when the next step is requested.
    """
    for index, step in enumerate(steps):
        model.blocks[0].requires_grad_(index not in (0, 2))
        yield step


def gradual_reference():
    """Freeze and unfreeze the block in one process."""
    model = materialised("plain", tied=True)
    return plain_trace(model, freezing_steps(model, cases.ragged_steps(2, steps=4, keys=())))


def train_gradually(rank, world, config):
    """Freeze the block before the engine exists, which is refused, and after it.

    Runs on every rank.
    """
    model = cases.build("plain", tied=True)
    model.blocks[0].requires_grad_(False)
    engine = cases.engine(model, config)
    engine.model.blocks[0].requires_grad_(True)
    remedy = r"freeze it afterwards \(requires_grad_\(False\)\) until its training starts"
    with pytest.raises(InputError, match=remedy):
        engine_trace(engine, cases.ragged_steps(world, steps=1, keys=()))
    engine.close()

    engine = cases.engine(cases.build("plain", tied=True), config)
    steps = freezing_steps(engine.model, cases.ragged_steps(world, steps=4, keys=()))
    trace = engine_trace(engine, steps)
    return trace if rank == 0 else None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradual_unfreezing(pool, stage):
    trace = pool.run(2, train_gradually, settings(2, stage, 1, 1))[0]
    expected = gradual_reference()
    is_frozen = [gradients["blocks.0.up.weight"] is None for gradients in expected.gradients]
    assert is_frozen == [True, False, True, False]
    assert_same(expected, trace)


def train_with_rebuilt_buckets(rank, world):
    """Rebuild the gradient buckets while the block is frozen, as a choice of compression does.

    Runs on every rank.
    """
    engine = cases.engine(cases.build("plain", tied=True), settings(2, 0, 1, 1))
    reducer = engine.sharded.hooks.find(Reducer)

    def steps():
        gradual = freezing_steps(engine.model, cases.ragged_steps(world, steps=4, keys=()))
        for index, step in enumerate(gradual):
            if index == 2:
                reducer.rebuild(reducer.make_buckets, bucket_bytes=4096, separate_vectors=False)
            yield step

    trace = engine_trace(engine, steps())
    return trace if rank == 0 else None


def test_buckets_rebuilt_while_a_block_is_frozen(pool):
    assert_same(gradual_reference(), pool.run(2, train_with_rebuilt_buckets)[0])


def unfreeze_with_a_group(model, optimizer):
    """Train a block that the optimizer has not held so far."""
    model.blocks[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model.blocks[0].parameters())})


def train_with_an_added_group(rank, world, config, folder):
    """Return weights, and the number of groups after a checkpoint. Runs on every rank."""
    model = cases.build("plain", tied=True)
    model.blocks[0].requires_grad_(False)
    engine = cases.engine(model, config, optimizer=cases.adamw)
    for index, step in enumerate(cases.ragged_steps(world, steps=3, keys=())):
        if index == 1:
            unfreeze_with_a_group(model, engine.optimizer)
        engine.train_batch(step[rank])
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    weights = {name: full_tensor_on_cpu(parameter) for name, parameter in model.named_parameters()}
    groups = len(engine.optimizer.param_groups)
    engine.close()
    return weights, groups


@pytest.mark.parametrize("stage", [0, 2])
def test_a_group_for_an_unfrozen_block(pool, tmp_path, stage):
    model = materialised("plain", tied=True)
    model.blocks[0].requires_grad_(False)
    optimizer = cases.adamw([p for p in model.parameters() if p.requires_grad])
    for index, step in enumerate(cases.ragged_steps(2, steps=3, keys=())):
        if index == 1:
            unfreeze_with_a_group(model, optimizer)
        loss = 0.0
        weight = 0
        for batch in step:
            batch_loss, batch_weight = plait.causal_lm_loss(model(batch["input_ids"]), batch)
            loss += batch_loss
            weight += batch_weight
        (loss / weight).backward()
        update(model, optimizer)

    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    config = settings(2, stage, 1, 1)
    for weights, groups in pool.run(2, train_with_an_added_group, config, str(tmp_path)):
        assert groups == 2
        close(weights, expected, atol=1e-10)


def update(model, optimizer):
    """Clip as the configuration says, and step."""
    nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
    optimizer.step()
    optimizer.zero_grad()


def steps_with_reference(model, micro_batches, *, with_gradient):
    """Yield steps before which the model runs without its adapters.

    With gradients it runs before the first step only.
    """
    for index, step in enumerate(cases.ragged_steps(micro_batches, steps=3)):
        for batch in step:
            # The adapted model has a smaller vocabulary.
            batch["input_ids"] %= trainers.VOCABULARY
            batch["labels"][batch["labels"] >= 0] %= trainers.VOCABULARY
        if index == 0 or not with_gradient:
            with torch.set_grad_enabled(with_gradient), model.disable_adapter():
                model(input_ids=step[0]["input_ids"])
        yield step


def train_adapters(rank, world, config, with_gradient):
    """Runs on every rank."""
    engine = cases.engine(adapted.model(torch.float64), config)
    steps = steps_with_reference(engine.model, world, with_gradient=with_gradient)
    trace = engine_trace(engine, steps)
    return trace if rank == 0 else None


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_reference_without_adapters_first(pool, stage, with_gradient):
    pytest.importorskip("peft")
    model = adapted.model(torch.float64)
    # Rotary angles stay in float32 in this process, as on the ranks.
    expected = reference_trace(
        model,
        steps_with_reference(model, 2, with_gradient=with_gradient),
        loss_fn=plait.causal_lm_loss,
        optimizer=cases.adamw,
        clipping=CLIPPING,
    )
    trace = pool.run(2, train_adapters, settings(2, stage, 1, 1), with_gradient)[0]
    assert_same(expected, trace)


def evaluate_base_and_train(trainer_kind, arguments, folder, **settings):
    """Return the base model's loss, and the run that follows."""
    losses = []

    class Baseline(trainer_kind):
        def train(self, *args, **kwargs):
            with self.model.disable_adapter():
                losses.append(self.evaluate()["eval_loss"])
            return super().train(*args, **kwargs)

    result = trainers.run(
        Baseline, arguments, folder, made=adapted.model, learning_rate=3e-2, **settings
    )
    return losses[0], result


def evaluate_base_on_plait(rank, world, config, folder):
    """Runs on every rank."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        return evaluate_base_and_train(Trainer, TrainingArguments, folder, deepspeed=config)


@pytest.mark.parametrize("stage", [0, 3])
def test_evaluation_without_adapters_first(pool, tmp_path, stage):
    pytest.importorskip("peft")
    from transformers import Trainer, TrainingArguments

    with trainers.launched_alone():
        expected_loss, expected = evaluate_base_and_train(
            Trainer, TrainingArguments, str(tmp_path / "native"), gradient_accumulation_steps=4
        )
    arguments = (trainers.zero(stage), str(tmp_path / "plait"))
    for loss, result in pool.run(2, evaluate_base_on_plait, *arguments):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        trainers.close(result, expected)


def generator_and_discriminator():
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double()
    discriminator = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    return generator, discriminator


def noise():
    """Noise of three steps, with a row per rank and micro-batch."""
    draws = torch.Generator().manual_seed(2)
    return torch.randn(3, 4, 4, dtype=torch.float64, generator=draws)


def train_both(rank, world, stage, accumulation):
    """Return the weights of generator and discriminator. Runs on every rank."""
    config = settings(world, stage, 1, accumulation) | {"train_micro_batch_size_per_gpu": 1}
    models = generator_and_discriminator()
    generator = plait.initialize(models[0], config)
    discriminator = plait.initialize(models[1], config)
    for step in noise():
        for micro_batch in step[: world * accumulation].chunk(accumulation):
            inputs = micro_batch[rank : rank + 1]
            discriminator.model.requires_grad_(False)
            generator.backward(discriminator(generator(inputs)).mean())
            generator.step()

            discriminator.model.requires_grad_(True)
            fake_score = discriminator(generator(inputs).detach()).mean()
            discriminator.backward(fake_score - discriminator(inputs).mean())
            discriminator.step()
    weights = []
    for model in models:
        weights.append({name: full_tensor_on_cpu(p) for name, p in model.named_parameters()})
    return weights


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_generator_first(pool, stage, accumulation):
    """The discriminator is frozen in its first forward, which is one of the generator's loss."""
    generator, discriminator = generator_and_discriminator()
    generator_optimizer = cases.adamw(list(generator.parameters()))
    discriminator_optimizer = cases.adamw(list(discriminator.parameters()))
    for step in noise():
        for index, inputs in enumerate(step[: 2 * accumulation].chunk(accumulation)):
            last = index == accumulation - 1
            discriminator.requires_grad_(False)
            (discriminator(generator(inputs)).mean() / accumulation).backward()
            discriminator.requires_grad_(True)
            if last:
                update(generator, generator_optimizer)
            fake_score = discriminator(generator(inputs).detach()).mean()
            ((fake_score - discriminator(inputs).mean()) / accumulation).backward()
            if last:
                update(discriminator, discriminator_optimizer)

    expected = [
        {name: parameter.detach() for name, parameter in model.named_parameters()}
        for model in (generator, discriminator)
    ]
    for weights in pool.run(2, train_both, stage, accumulation):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
