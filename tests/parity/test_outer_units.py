"""Embeddings and heads that are sharding units of their own train as in one process.

The models use the weights of these outer layers in all ways that differ for sharding.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait._torch.units import unsharded_parameter_bytes
from plait.errors import InputError
from plait.model.outer_layers import OuterUnits, outer_units
from plait.verify.parity import engine_trace, full_tensor_on_cpu
from tests.measured.traffic import count_traffic
from tests.parity import cases
from tests.parity.cases import VOCABULARY, Block, Output
from tests.parity.data_parallel import assert_same, plain_trace, settings
from tests.parity.mean_losses import close
from tests.table import check_rows

WIDTH = 12


class Base(nn.Module):
    """An untied language model of three blocks. Subclasses use the outer layers differently."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.second = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def embedded(self, ids, flag):
        return self.embed(ids) + self.second(ids)

    def logits(self, hidden):
        return self.head(hidden)

    def forward(self, input_ids, flag=True):
        hidden = self.embedded(input_ids, flag)
        for block in self.blocks:
            hidden = block(hidden, True)
        return Output(self.logits(self.norm(hidden)))


class UsedByOneRank(Base):
    """The second embedding is used by some micro-batches only."""

    def embedded(self, ids, flag):
        return self.embed(ids) + (self.second(ids) if flag else 0)


class CalledTwice(Base):
    """The first embedding and the head are called twice.

    The backward of the second call of the head begins before that of the first has ended.
    """

    def embedded(self, ids, flag):
        return self.embed(ids) + self.embed(ids.flip(-1)) * self.second(ids)

    def logits(self, hidden):
        return torch.stack([self.head(hidden), self.head(hidden.tanh())]).sum(0)


class FirstCallWithoutGradient(Base):
    """The first call of the head trains its weight, with an input that needs no gradient."""

    def logits(self, hidden):
        return torch.stack([self.head(hidden.detach()), self.head(hidden)]).sum(0)


class ReadsEmbedding(Base):
    """Logits are also computed with the embedding, whose weight is read and not tied."""

    def logits(self, hidden):
        return self.head(hidden) + F.linear(hidden, self.embed.weight)


class HookReadsEmbedding(Base):
    """A forward hook of the embedding reads its weight, and so does the hook's backward."""

    def __init__(self):
        super().__init__()
        self.embed.register_forward_hook(
            lambda module, _, output: output + 0.1 * output @ module.weight.t() @ module.weight
        )


class ReadsHead(Base):
    """The head is never called: another function reads its weight."""

    def logits(self, hidden):
        return hidden @ self.head.weight.t() + self.head.bias


class ReadsHeadFirst(Base):
    """Tokens are also looked up in the head's weight, before the head is called."""

    def embedded(self, ids, flag):
        looked_up = F.embedding(ids, self.head.weight)
        return self.embed(ids) + looked_up @ self.head.weight.t() @ self.second.weight


class ReadsAll(Base):
    """The forward reads every parameter outside of the blocks, by iteration."""

    def logits(self, hidden):
        (embedding,) = self.embed.parameters()
        (second,) = self.second.parameters()
        scale = 1 + 0.1 * embedding.square().sum().sqrt()
        return self.head(hidden) * scale + 0 * second.sum()


MODELS: dict[str, type[Base]] = {
    kind.__name__: kind
    for kind in (
        Base,
        UsedByOneRank,
        CalledTwice,
        FirstCallWithoutGradient,
        ReadsEmbedding,
        HookReadsEmbedding,
        ReadsHead,
        ReadsHeadFirst,
        ReadsAll,
    )
}
FROZEN = {
    "FrozenEmbedding": ("embed",),
    "FrozenHead": ("head",),
    "OnlyHead": ("embed", "second", "blocks", "norm"),
}
"""Modules of Base that are frozen."""
NAMES = [*MODELS, *FROZEN]
QUICK = ["UsedByOneRank", "CalledTwice", "ReadsHeadFirst"]
"""Models that differ most from Base in how they use their outer layers."""


def model_of(name):
    torch.manual_seed(5)
    model = MODELS.get(name, Base)().double()
    for module in FROZEN.get(name, ()):
        model.get_submodule(module).requires_grad_(False)
    return model


def steps(micro_batches):
    """Micro-batches of two steps, of which every second one sets the flag."""
    plan = cases.ragged_steps(micro_batches, steps=2, keys=())
    for step in plan:
        for index, batch in enumerate(step):
            batch["flag"] = index % 2 == 1
    return plan


def train(rank, world, names, config):
    """Return the trace of every model, and gathered bytes after an evaluation.

    Runs on every rank.
    """
    results = []
    for name in names:
        engine = cases.engine(model_of(name), config)
        trace = engine_trace(engine, steps(world * config["gradient_accumulation_steps"]))
        engine.predict(steps(1)[0][0])
        results.append((trace, unsharded_parameter_bytes(engine.model)))
        engine.close()
    return results if rank == 0 else []


def compare_models(pool, world, names, config):
    """Compare all models with one process."""
    micro_batches = world * config["gradient_accumulation_steps"]

    def check(row):
        name, (trace, gathered_bytes) = row
        assert_same(plain_trace(model_of(name), steps(micro_batches)), trace)
        assert not gathered_bytes

    results = pool.run(world, train, names, config)[0]
    check_rows(dict(zip(names, zip(names, results, strict=True), strict=True)), check)


@pytest.mark.parametrize(
    ("stage", "accumulation", "transport", "models"),
    [
        (3, 2, "torch", NAMES),
        (2, 1, "auto", QUICK),
        pytest.param(2, 1, "auto", NAMES, marks=pytest.mark.proof),
        pytest.param(1, 2, "torch", NAMES, marks=pytest.mark.proof),
    ],
    ids=["stage 3", "stage 2, some models", "stage 2", "stage 1"],
)
def test_gradients_are_those_of_one_process(pool, stage, accumulation, transport, models):
    config = settings(2, stage, 1, accumulation)
    config["parallel"]["transport"] = transport
    compare_models(pool, 2, models, config)


@pytest.mark.parametrize(
    ("partitioned", "replicated"),
    [
        (["ReadsHeadFirst"], ["CalledTwice"]),
        pytest.param(NAMES, NAMES, marks=pytest.mark.proof),
    ],
    ids=["some models", "all models"],
)
def test_secondary_partition_and_replicas(pool, partitioned, replicated):
    config = settings(4, 3, 1, 1)
    config["zero_optimization"]["zero_hpz_partition_size"] = 2
    compare_models(pool, 4, partitioned, config)
    compare_models(pool, 4, replicated, settings(4, 3, 2, 2))


def gathered_bytes(rank, world, name):
    """Return bytes that a micro-batch gathers, and gathered bytes in front of the second block.

    Runs on every rank.
    """
    model = model_of(name)
    config = settings(2, 3, 1, 1, gradient_clipping=0.0)
    config["parallel"]["transport"] = "torch"
    engine = cases.engine(model, config)
    in_block: list[int] = []
    model.blocks[1].register_forward_pre_hook(
        lambda *_: in_block.append(unsharded_parameter_bytes(model))
    )
    # Units are chosen in the first step.
    for _ in range(2):
        with count_traffic() as traffic:
            engine.train_batch(steps(1)[0][0])
    return traffic.bytes()["all_gather"], in_block[-1]


def padded_bytes(parameters):
    """Return bytes of float64 parameters whose rows are padded to a multiple of two ranks."""
    return sum(8 * (-(-p.shape[0] // 2)) * 2 * p[0].numel() for p in parameters)


def test_each_outer_layer_is_gathered_once_and_freed(pool):
    """A block is gathered twice per micro-batch, an outer layer and the root once."""
    traffic, in_block = pool.run(2, gathered_bytes, "Base")[0]
    model = model_of("Base")
    block = padded_bytes(model.blocks[0].parameters())
    outer = padded_bytes(model.parameters()) - 3 * block
    # A rank sends half of what is gathered.
    assert traffic == (3 * 2 * block + outer) // 2
    # The root unit has the norm.
    assert in_block == block + sum(8 * p.numel() for p in model.norm.parameters())


def test_an_embedding_that_others_read_stays_gathered(pool):
    """It is gathered once per micro-batch, as the root is."""
    expected_traffic, expected_in_block = pool.run(2, gathered_bytes, "Base")[0]
    traffic, in_block = pool.run(2, gathered_bytes, "ReadsEmbedding")[0]
    assert traffic == expected_traffic
    # 101 rows are padded to 102.
    assert in_block - expected_in_block == 8 * (VOCABULARY + 1) * WIDTH


def gradients_of(model):
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = full_tensor_on_cpu(parameter.grad)
    return gradients


def mean_gradients(name, backward):
    """Return the mean of both ranks' gradients in one process."""
    model = model_of(name)
    for rank in range(2):
        backward(model, rank)
    return {name: gradient / 2 for name, gradient in gradients_of(model).items()}


def backward_of_two_forwards(model, rank):
    """Run one backward of two forwards with an evaluation between, then a backward of each."""
    first, second = [step[rank]["input_ids"] for step in steps(2)]
    total = model(first).logits.square().mean() + model(second).logits.square().mean()
    with torch.no_grad():
        model(first)
    total.backward()

    first_loss = model(first).logits.square().mean()
    second_loss = model(second).logits.tanh().mean()
    first_loss.backward()
    second_loss.backward()


def sharded_backward_of_two_forwards(rank, world, stage):
    """Runs on every rank."""
    model = model_of("ReadsEmbedding")
    plait.parallelize(model, settings(2, stage, 1, 1))
    backward_of_two_forwards(model, rank)
    return gradients_of(model)


@pytest.mark.parametrize("stage", [2, 3])
def test_several_forwards_before_a_backward(pool, stage):
    expected = mean_gradients("ReadsEmbedding", backward_of_two_forwards)
    for gradients in pool.run(2, sharded_backward_of_two_forwards, stage):
        close(gradients, expected)


def penalised_backward(model, rank, name):
    """Run the backward of a loss that reads a weight itself, after the forward."""
    loss = model(steps(2)[0][rank]["input_ids"]).logits.square().mean()
    (loss + 0.3 * model.get_parameter(name).square().sum()).backward()


def sharded_penalised_backward(rank, world, stage, name):
    """Return the gradients, or the message of a refusal. Runs on every rank."""
    model = model_of("Base")
    plait.parallelize(model, settings(2, stage, 1, 1))
    try:
        penalised_backward(model, rank, name)
    except InputError as error:
        return str(error)
    return gradients_of(model)


@pytest.mark.parametrize(
    ("stage", "name"), [(1, "head.weight"), (2, "embed.weight"), (3, "head.weight")]
)
def test_a_loss_that_reads_a_weight(pool, stage, name):
    expected = mean_gradients("Base", lambda model, rank: penalised_backward(model, rank, name))
    for gradients in pool.run(2, sharded_penalised_backward, stage, name):
        assert isinstance(gradients, dict), gradients
        close(gradients, expected)


def test_a_loss_that_reads_a_freed_embedding_is_refused(pool):
    for message in pool.run(2, sharded_penalised_backward, 3, "embed.weight"):
        assert "embed.weight is read by the loss itself" in message


def penalty_before_forward(rank, world, stage):
    """Return the message about a penalty that is computed before the forward.

    Runs on every rank.
    """
    model = model_of("Base")
    plait.parallelize(model, settings(2, stage, 1, 1))
    penalty = model.embed.weight.square().sum()
    loss = model(steps(2)[0][rank]["input_ids"]).logits.square().mean()
    with pytest.raises(InputError) as error:
        (0.3 * penalty + loss).backward()
    return str(error.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_penalty_before_the_forward_is_refused(pool, stage):
    """`test_a_loss_that_reads_a_weight` follows the remedy."""
    for message in pool.run(2, penalty_before_forward, stage):
        assert message.startswith("embed.weight is read by the loss itself (a penalty on weights?)")
        assert "read it after the model was called (below ZeRO stage 3 it is unsharded" in message


def multiply_shard_by_mask(rank, world):
    """Return messages about losses that multiply a weight by a mask. Runs on every rank."""
    model = model_of("Base")
    sharded = plait.parallelize(model, settings(2, 3, 1, 1))
    ids = steps(2)[0][rank]["input_ids"]

    def loss():
        mask = torch.ones(model.embed.weight.shape, dtype=torch.float64)
        return model(ids).logits.square().mean() + (model.embed.weight * mask).sum()

    messages = []
    with pytest.raises(InputError) as error, sharded.accumulate():
        loss()
    messages.append(str(error.value))
    with pytest.raises(InputError) as error:
        sharded.forward_backward([{"input_ids": ids}], lambda output, batch: loss())
    messages.append(str(error.value))

    with pytest.raises(RuntimeError, match="got mixed") as torch_error:
        loss()
    report = StringIO()
    with redirect_stderr(report):
        sys.excepthook(torch_error.type, torch_error.value, torch_error.tb)
    messages.append(report.getvalue())
    sharded.close()
    return messages


def test_a_product_of_a_shard_and_a_tensor_is_explained(pool):
    """Plait's calls raise an error of their own. Elsewhere torch's error gets a note."""
    for messages in pool.run(2, multiply_shard_by_mask):
        for message in messages:
            assert "aten.mul.Tensor was given a full tensor together with one" in message
            assert "its parameters are shards (ZeRO stage 3)" in message
            assert "read no weight there" in message


def test_which_layers_are_units():
    """Tied weights, and layers that do more than look up or multiply, stay in the root unit."""
    model = model_of("Base")
    blocks = ("blocks.0", "blocks.1", "blocks.2")
    assert outer_units(model, blocks) == OuterUnits(("embed", "second"), "head")
    assert outer_units(model, ()) == OuterUnits()
    model.head.weight = model.embed.weight
    assert outer_units(model, blocks) == OuterUnits(("second",), None)
    # A forward with max_norm writes into the weight.
    model.second.max_norm = 1.0
    assert outer_units(model, blocks) == OuterUnits()
