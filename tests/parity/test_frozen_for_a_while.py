"""Parameters that are frozen while the model runs for the first time, and trained later."""

from __future__ import annotations

from typing import Any

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

ADVICE = (
    r"call requires_grad_\(True\) before plait.initialize, and requires_grad_\(False\) after it"
)


class GradualSteps:
    """Steps of which the first and the third train without one block of the model.

    The block is frozen and unfrozen between steps, when the next step is asked for.
    """

    def __init__(self, model, steps):
        self._model, self._steps = model, steps

    def __iter__(self):
        for index, step in enumerate(self._steps):
            self._model.blocks[0].requires_grad_(index not in (0, 2))
            yield step


def train(rank, world, config):
    """Runs in a worker. What is frozen when it is sharded is refused, and the advice is what the trace then follows."""
    model = cases.build("plain", tied=True)
    model.blocks[0].requires_grad_(False)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    engine.model.blocks[0].requires_grad_(True)
    with pytest.raises(InputError, match=ADVICE):
        engine_trace(engine, cases.ragged_steps(world, steps=1, keys=()))
    engine.close()
    engine = plait.initialize(cases.build("plain", tied=True), config, loss_fn=plait.causal_lm_loss)
    trace = engine_trace(
        engine, GradualSteps(engine.model, cases.ragged_steps(world, steps=4, keys=()))
    )  # type: ignore[arg-type]
    return trace if rank == 0 else None


class RebuiltSteps(GradualSteps):
    """Steps in which the buckets of gradients are made anew while the block is frozen, as a choice of compression does."""

    def __init__(self, engine, steps):
        super().__init__(engine.model, steps)
        self._reducer = engine.sharded.hooks.find(Reducer)

    def __iter__(self):
        assert self._reducer is not None
        reducer = self._reducer
        for index, step in enumerate(super().__iter__()):
            if index == 2:
                reducer.rebuild(reducer.make_buckets, bucket_bytes=4096, separate_vectors=False)
            yield step


def train_with_other_buckets(rank, world):
    """Runs in a worker."""
    engine = cases.engine(cases.build("plain", tied=True), settings(2, 0, 1, 1))
    trace = engine_trace(engine, RebuiltSteps(engine, cases.ragged_steps(world, steps=4, keys=())))  # type: ignore[arg-type]
    return trace if rank == 0 else None


def gradual_reference():
    """One process that freezes and unfreezes the block."""
    model = materialised("plain", tied=True)
    steps: Any = GradualSteps(model, cases.ragged_steps(2, steps=4, keys=()))
    return plain_trace(model, steps)


def test_buckets_rebuilt_while_a_block_is_frozen(pool):
    assert_same(gradual_reference(), pool.run(2, train_with_other_buckets)[0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradual_unfreezing(pool, stage):
    found = pool.run(2, train, settings(2, stage, 1, 1))[0]
    wanted = gradual_reference()
    assert [step["blocks.0.up.weight"] is None for step in wanted.gradients] == [
        True,
        False,
        True,
        False,
    ]
    assert_same(wanted, found)


def unfrozen_with_a_group(rank, world, config, folder):
    """Runs in a worker: a block that the optimizer gets after the first step. Returns the weights, and the groups of a checkpoint."""
    model = cases.build("plain", tied=True)
    model.blocks[0].requires_grad_(False)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss, optimizer=cases.adamw)
    for index, step in enumerate(cases.ragged_steps(world, steps=3, keys=())):
        if index == 1:
            model.blocks[0].requires_grad_(True)
            engine.optimizer.add_param_group({"params": list(model.blocks[0].parameters())})
        engine.train_batch(step[rank])
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    weights = {name: full_tensor_on_cpu(parameter) for name, parameter in model.named_parameters()}
    count = len(engine.optimizer.param_groups)
    engine.close()
    return weights, count


@pytest.mark.parametrize("stage", [0, 2])
def test_a_group_for_an_unfrozen_block(pool, tmp_path, stage):
    """As in one process; the checkpoint has its group."""
    model = materialised("plain", tied=True)
    model.blocks[0].requires_grad_(False)
    optimizer = cases.adamw([p for p in model.parameters() if p.requires_grad])
    for index, step in enumerate(cases.ragged_steps(2, steps=3, keys=())):
        if index == 1:
            model.blocks[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model.blocks[0].parameters())})
        parts = [plait.causal_lm_loss(model(piece["input_ids"]), piece) for piece in step]
        (sum(loss for loss, _ in parts) / sum(weight for _, weight in parts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
    wanted = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for found, groups in pool.run(
        2, unfrozen_with_a_group, settings(2, stage, 1, 1), str(tmp_path)
    ):
        assert groups == 2
        close(found, wanted, atol=1e-10)


class WithReference:
    """Steps before which the model runs without its adapters: before each, or, with gradients, before the first."""

    def __init__(self, model, steps, *, grad):
        self._model, self._steps, self._grad = model, steps, grad

    def __iter__(self):
        for index, step in enumerate(self._steps):
            if index == 0 or not self._grad:
                with torch.set_grad_enabled(self._grad), self._model.disable_adapter():
                    self._model(input_ids=step[0]["input_ids"])
            yield step


def adapted_trace(rank, world, config, grad):
    """Runs in a worker."""
    engine = plait.initialize(adapted.model(torch.float64), config, loss_fn=plait.causal_lm_loss)
    steps: Any = WithReference(engine.model, adapter_steps(world), grad=grad)
    trace = engine_trace(engine, steps)
    return trace if rank == 0 else None


def adapter_steps(micro_batches):
    """Steps whose tokens are in the vocabulary of the adapted model."""
    steps = cases.ragged_steps(micro_batches, steps=3)
    for piece in (piece for step in steps for piece in step):
        piece["input_ids"] %= trainers.VOCABULARY
        piece["labels"] = torch.where(
            piece["labels"] < 0, piece["labels"], piece["labels"] % trainers.VOCABULARY
        )
    return steps


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_reference_without_adapters_first(pool, stage, grad):
    pytest.importorskip("peft")
    found = pool.run(2, adapted_trace, settings(2, stage, 1, 1), grad)[0]
    model = adapted.model(torch.float64)
    steps: Any = WithReference(model, adapter_steps(2), grad=grad)
    # Like the ranks, without a float64 of the rotary angles.
    wanted = reference_trace(
        model, steps, loss_fn=plait.causal_lm_loss, optimizer=cases.adamw, clipping=CLIPPING
    )
    assert_same(wanted, found)


def evaluated_first(kind, arguments, folder, **settings):
    """(the base model's loss, the run that follows)."""
    base: list[float] = []

    class Baseline(kind):
        def train(self, *args, **given):
            with self.model.disable_adapter():
                base.append(self.evaluate()["eval_loss"])
            return super().train(*args, **given)

    run = trainers.run(
        Baseline, arguments, folder, made=adapted.model, learning_rate=3e-2, **settings
    )
    return base[0], run


def evaluated_on_plait(rank, world, config, folder):
    """Runs in a worker."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        return evaluated_first(Trainer, TrainingArguments, folder, deepspeed=config)


@pytest.mark.parametrize("stage", [0, 3])
def test_evaluation_without_adapters_first(pool, tmp_path, stage):
    pytest.importorskip("peft")
    from transformers import Trainer, TrainingArguments

    with trainers.launched_alone():
        base, wanted = evaluated_first(
            Trainer, TrainingArguments, str(tmp_path / "native"), gradient_accumulation_steps=4
        )
    for found_base, found in pool.run(
        2, evaluated_on_plait, trainers.zero(stage), str(tmp_path / "plait")
    ):
        assert found_base == pytest.approx(base, rel=1e-5)
        trainers.close(found, wanted)


def pair():
    """(generator, discriminator)."""
    torch.manual_seed(1)
    generator, discriminator = (
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, size)).double() for size in (4, 1)
    )
    return generator, discriminator


def noise():
    """Noise of every step, a row per rank and micro-batch."""
    return list(
        torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    )


def adversarial(rank, world, stage, accumulation):
    """Weights of both models. Runs in a worker."""
    config = settings(world, stage, 1, accumulation) | {"train_micro_batch_size_per_gpu": 1}
    made, judge = (plait.initialize(model, config) for model in pair())
    for step in noise():
        for z in step[: world * accumulation].chunk(accumulation):
            mine = z[rank : rank + 1]
            judge.model.requires_grad_(False)
            made.backward(judge(made(mine)).mean())
            made.step()
            judge.model.requires_grad_(True)
            judge.backward(judge(made(mine).detach()).mean() - judge(mine).mean())
            judge.step()
    return [
        {name: full_tensor_on_cpu(p) for name, p in engine.model.named_parameters()}
        for engine in (made, judge)
    ]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_generator_first(pool, stage, accumulation):
    made, judge = pair()
    optimizers = [cases.adamw(list(model.parameters())) for model in (made, judge)]
    for step in noise():
        for index, z in enumerate(step[: 2 * accumulation].chunk(accumulation)):
            judge.requires_grad_(False)
            (judge(made(z)).mean() / accumulation).backward()
            judge.requires_grad_(True)
            if index == accumulation - 1:
                update(made, optimizers[0])
            fake = made(z).detach()
            ((judge(fake).mean() - judge(z).mean()) / accumulation).backward()
            if index == accumulation - 1:
                update(judge, optimizers[1])
    for found in pool.run(2, adversarial, stage, accumulation):
        for weights, model in zip(found, (made, judge), strict=True):
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=1e-10)


def update(model, optimizer):
    """Clip as the configuration says, and step."""
    nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
    optimizer.step()
    optimizer.zero_grad()
