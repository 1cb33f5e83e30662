"""0-dimensional parameters, such as CLIP's temperature, at every ZeRO stage."""

import pytest
import torch
from torch import nn

import plait
from plait.errors import ModelError
from plait.verify.parity import engine_trace
from tests.parity import cases
from tests.parity.data_parallel import assert_same, plain_trace, settings
from tests.parity.full_tensors import assert_gradients_close, full_gradients
from tests.parity.refusals import message_of


class ScaledModel(cases.PlainModel):
    """A model with a scalar in the root and one in each block."""

    def __init__(self):
        super().__init__(tied=True)
        self.logit_scale = nn.Parameter(torch.tensor(0.3))
        for block in self.blocks:
            block.gain = nn.Parameter(torch.tensor(0.9))

    def forward(self, input_ids, side=False):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, False)
            if side:
                hidden = hidden * block.gain
        return cases.Output(self.head(hidden) * self.logit_scale.exp())


def build():
    torch.manual_seed(7)
    return ScaledModel().to(torch.float64)


def steps(micro_batches):
    """Return three steps.

    All micro-batches of the first use the scalars of blocks, none of the second, and only the first
    micro-batch of the third.
    """
    plan = cases.ragged_steps(micro_batches, steps=3, keys=())
    for step, micro_batches_of_step in enumerate(plan):
        for index, micro_batch in enumerate(micro_batches_of_step):
            micro_batch["side"] = step == 0 or (step == 2 and index == 0)
    return plan


def train(rank, world, config):
    """Runs on every rank."""
    engine = cases.engine(build(), config)
    trace = engine_trace(engine, steps(world * config["gradient_accumulation_steps"]))
    return trace if rank == 0 else None


@pytest.mark.parametrize(("stage", "accumulation"), [(1, 2), (2, 1), (3, 2)])
def test_scalars_train_at_every_stage(pool, stage, accumulation):
    trace = pool.run(2, train, settings(2, stage, 1, accumulation))[0]
    assert_same(plain_trace(build(), steps(2 * accumulation)), trace)


def steps_without_block_scalars():
    return cases.ragged_steps(4, steps=3, keys=())


def train_in_a_pipeline(rank, world):
    """Return the messages for refused settings, and the losses of a run. Runs on every rank."""
    config = settings(1, 0, 1, 2) | {"parallel": {"pp": 2, "dp_replicate": 2}}
    sharded = settings(1, 1, 1, 2) | {"parallel": {"pp": 2, "dp_shard": 2}}
    messages = [
        message_of(cases.engine, build(), sharded, error=ModelError),
        message_of(cases.engine, build(), config | {"bf16": {"enabled": True}}, error=ModelError),
    ]

    # The remedy of the messages.
    engine = cases.engine(build(), config)
    start = engine.dp_rank * 2
    losses = []
    for step in steps_without_block_scalars():
        losses.append(float(engine.train_batch(step[start : start + 2]).loss))
    return messages, losses


def test_pipelines_train_scalars_without_zero_and_casts(pool):
    expected = plain_trace(build(), steps_without_block_scalars())
    for messages, losses in pool.run(4, train_in_a_pipeline):
        for message in messages:
            assert "is a 0-dimensional parameter" in message
            assert "use ZeRO stage 0 without bf16, fp16 and offloading" in message
        assert losses == pytest.approx(expected.losses, rel=1e-10)


def mean_loss(model, micro_batch):
    output = model(micro_batch["input_ids"], side=micro_batch["side"])
    total, weight = plait.causal_lm_loss(output, micro_batch)
    return total / max(int(weight), 1)


def gradients_of_own_loop(rank, world):
    """Return the gradients of two micro-batches per rank. Runs on every rank."""
    model = build()
    sharded = plait.parallelize(model, settings(2, 2, 1, 2))
    first, last = steps(2 * world)[2][2 * rank : 2 * rank + 2]
    with sharded.accumulate():
        (mean_loss(model, first) / 2).backward()
    (mean_loss(model, last) / 2).backward()
    return full_gradients(model)


def test_own_loop(pool):
    model = build()
    for micro_batch in steps(4)[2]:
        (mean_loss(model, micro_batch) / 4).backward()
    for gradients in pool.run(2, gradients_of_own_loop):
        assert_gradients_close(gradients, full_gradients(model))


def save_and_load(rank, world, folder):
    """Return the losses of a run, and of one that resumes it on another layout.

    Runs on every rank.
    """
    first, *others = [[step[rank]] for step in steps(world)]
    engine = cases.engine(build(), settings(2, 3, 1, 1))
    engine.train_batch(first)
    engine.save_checkpoint(folder)
    losses = [float(engine.train_batch(batch)) for batch in others]

    engine = cases.engine(build(), settings(2, 0, 1, 1))
    engine.load_checkpoint(folder)
    return losses, [float(engine.train_batch(batch)) for batch in others]


def test_checkpoint_on_another_layout(pool, tmp_path):
    for losses, resumed in pool.run(2, save_and_load, str(tmp_path)):
        assert resumed == pytest.approx(losses, rel=1e-12)
