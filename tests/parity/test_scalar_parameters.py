"""0-dimensional parameters, such as CLIP's temperature, at every ZeRO stage."""

import pytest
import torch
from torch import nn

import plait
from plait.errors import ModelError
from plait.verify.parity import engine_trace, full_tensor_on_cpu
from tests.parity import cases
from tests.parity.data_parallel import assert_same, plain_trace, settings


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
            hidden = block(hidden, False) * block.gain if side else block(hidden, False)
        return cases.Output(self.head(hidden) * self.logit_scale.exp())


def build():
    """The model in float64, with the same weights on every call."""
    torch.manual_seed(7)
    return ScaledModel().to(torch.float64)


def steps(micro_batches):
    """Steps of which the second does not use the scalars of blocks, and of the third only the first micro-batch does."""
    plan = cases.ragged_steps(micro_batches, steps=3, keys=())
    uses = [lambda index: True, lambda index: False, lambda index: index == 0]
    return [
        [{**piece, "side": use(index)} for index, piece in enumerate(pieces)]
        for pieces, use in zip(plan, uses, strict=True)
    ]


def train(rank, world, config):
    """Runs in a worker."""
    engine = plait.initialize(build(), config, loss_fn=plait.causal_lm_loss)
    trace = engine_trace(engine, steps(world * config["gradient_accumulation_steps"]))
    return trace if rank == 0 else None


@pytest.mark.parametrize(("stage", "accumulation"), [(1, 2), (2, 1), (3, 2)])
def test_scalars_train_at_every_stage(pool, stage, accumulation):
    trace = pool.run(2, train, settings(2, stage, 1, accumulation))[0]
    expected = plain_trace(build(), steps(2 * accumulation))
    assert_same(expected, trace)


def in_a_pipeline(rank, world):
    """(refusals, losses of a pipeline). Runs in a worker."""
    refusals = []
    for stage, parallel, more in (
        (1, {"pp": 2, "dp_shard": 2}, {}),
        (0, {"pp": 2, "dp_replicate": 2}, {"bf16": {"enabled": True}}),
    ):
        config = settings(1, stage, 1, 2) | {"parallel": parallel} | more
        with pytest.raises(ModelError) as refused:
            plait.initialize(build(), config, loss_fn=plait.causal_lm_loss)
        refusals.append(str(refused.value))

    # What the messages advise.
    config = settings(1, 0, 1, 2) | {"parallel": {"pp": 2, "dp_replicate": 2}}
    engine = plait.initialize(build(), config, loss_fn=plait.causal_lm_loss)
    index = engine.dp_rank * 2
    return refusals, [
        float(engine.train_batch(step[index : index + 2]).loss) for step in plain_steps()
    ]


def plain_steps():
    """Steps that do not use the scalars of blocks."""
    return cases.ragged_steps(4, steps=3, keys=())


def test_pipelines(pool):
    """They train at ZeRO 0 in the model's own dtype, and are refused elsewhere."""
    expected = plain_trace(build(), plain_steps())
    for refusals, losses in pool.run(4, in_a_pipeline):
        for message in refusals:
            assert "is a 0-dimensional parameter" in message
            assert "use ZeRO stage 0 without bf16, fp16 and offloading" in message
        assert losses == pytest.approx(expected.losses, rel=1e-10)


def mean_of(model, piece):
    """Mean over the targets of a micro-batch."""
    total, weight = plait.causal_lm_loss(model(piece["input_ids"], side=piece["side"]), piece)
    return total / max(int(weight), 1)


def own_loop(rank, world):
    """Runs in a worker. Returns the gradients of two micro-batches per rank."""
    model = build()
    sharded = plait.parallelize(model, settings(2, 2, 1, 2))
    first, last = steps(2 * world)[2][2 * rank : 2 * rank + 2]
    with sharded.accumulate():
        (mean_of(model, first) / 2).backward()
    (mean_of(model, last) / 2).backward()
    return {
        name: None if p.grad is None else full_tensor_on_cpu(p.grad)
        for name, p in model.named_parameters()
    }


def test_own_loop(pool):
    model = build()
    for piece in steps(4)[2]:
        (mean_of(model, piece) / 4).backward()
    for gradients in pool.run(2, own_loop):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                gradients[name],
                parameter.grad,
                rtol=0,
                atol=1e-12,
                msg=lambda t, n=name: f"{n}: {t}",
            )


def save_and_load(rank, world, folder):
    """Runs in a worker. Returns the losses of a run, and of one that goes on from its checkpoint on another layout."""
    plan = steps(world)
    engine = plait.initialize(build(), settings(2, 3, 1, 1), loss_fn=plait.causal_lm_loss)
    engine.train_batch([plan[0][rank]])
    engine.save_checkpoint(folder)
    losses = [float(engine.train_batch([step[rank]])) for step in plan[1:]]
    engine = plait.initialize(build(), settings(2, 0, 1, 1), loss_fn=plait.causal_lm_loss)
    engine.load_checkpoint(folder)
    return losses, [float(engine.train_batch([step[rank]])) for step in plan[1:]]


def test_checkpoint_on_another_layout(pool, tmp_path):
    for losses, resumed in pool.run(2, save_and_load, str(tmp_path)):
        assert resumed == pytest.approx(losses, rel=1e-12)
