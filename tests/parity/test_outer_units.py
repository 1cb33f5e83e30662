"""Embeddings and heads that are sharding units of their own train as in one process, whatever the model does with their weights."""

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
from plait.verify.parity import compare, engine_trace, full_tensor_on_cpu, worst
from tests.measured.traffic import count_traffic
from tests.parity import cases
from tests.parity.cases import VOCABULARY, Block, Output
from tests.parity.data_parallel import plain_trace, settings
from tests.parity.mean_losses import close

WIDTH = 12


class Base(nn.Module):
    """An untied language model of three blocks. Subclasses use its embeddings and heads in their own way."""

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
    """The second embedding is used by some micro-batches only, and the head is passed over by others."""

    def embedded(self, ids, flag):
        return self.embed(ids) + (self.second(ids) if flag else 0)


class CalledTwice(Base):
    """Both ends are called twice, and the backward of the second call of the head begins before that of the first has ended."""

    def embedded(self, ids, flag):
        return self.embed(ids) + self.embed(ids.flip(-1)) * self.second(ids)

    def logits(self, hidden):
        return torch.stack([self.head(hidden), self.head(hidden.tanh())]).sum(0)


class FirstCallWithoutGradient(Base):
    """The first call of the head has an input without a gradient, and its weight is trained by it."""

    def logits(self, hidden):
        return torch.stack([self.head(hidden.detach()), self.head(hidden)]).sum(0)


class ReadsEmbedding(Base):
    """A second table of logits is the transposed embedding, which is read, and not tied."""

    def logits(self, hidden):
        return self.head(hidden) + F.linear(hidden, self.embed.weight)


class HookReadsEmbedding(Base):
    """A hook behind the embedding reads its weight, and the hook's backward does too."""

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
    """The head's weight is also what tokens are looked up in, before the head is called."""

    def embedded(self, ids, flag):
        return (
            self.embed(ids)
            + F.embedding(ids, self.head.weight) @ self.head.weight.t() @ self.second.weight
        )


class ReadsAll(Base):
    """The forward reads every parameter outside of the blocks, by iteration."""

    def logits(self, hidden):
        norms = sum(parameter.square().sum() for parameter in self.embed.parameters())
        return self.head(hidden) * (1 + 0.1 * norms.sqrt()) + 0 * sum(
            p.sum() for p in self.second.parameters()
        )


class FrozenEmbedding(Base):
    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)


class FrozenHead(Base):
    def __init__(self):
        super().__init__()
        self.head.requires_grad_(False)


class OnlyHead(Base):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.head.requires_grad_(True)


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
        FrozenEmbedding,
        FrozenHead,
        OnlyHead,
    )
}


def model_of(name):
    torch.manual_seed(5)
    return MODELS[name]().double()


READING = ["UsedByOneRank", "CalledTwice", "ReadsHeadFirst"]
"""Models that differ most from Base in how they use their ends."""


def steps(micro_batches):
    """Micro-batches of two steps, of which every second one sets the flag."""
    plan = cases.ragged_steps(micro_batches, steps=2, keys=())
    return [
        [{**piece, "flag": index % 2 == 1} for index, piece in enumerate(pieces)] for pieces in plan
    ]


def train(rank, world, names, config):
    """Runs in a worker: the trace of every model, and the bytes of parameters that are gathered after an evaluation."""
    found = []
    for name in names:
        engine = plait.initialize(model_of(name), config, loss_fn=plait.causal_lm_loss)
        trace = engine_trace(engine, steps(world * config["gradient_accumulation_steps"]))
        engine.predict(steps(1)[0][0])
        found.append((trace, unsharded_parameter_bytes(engine.model)))
        engine.close()
    return found if rank == 0 else []


def refuse_differences(pool, world, names, config):
    """Compare with one process, all models before the first failure is raised."""
    count, failures = world * config["gradient_accumulation_steps"], []
    for name, (found, gathered) in zip(
        names, pool.run(world, train, names, config)[0], strict=True
    ):
        wanted = plain_trace(model_of(name), steps(count))
        bar = worst(compare(wanted, found))
        if not bar.ok(1e-10) or gathered:
            failures.append(
                f"{name}: {bar.name} differs by {bar.error}, {gathered} bytes are gathered"
            )
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    ("stage", "accumulation", "transport", "models"),
    [
        (3, 2, "torch", list(MODELS)),
        (2, 1, "auto", READING),
        pytest.param(2, 1, "auto", list(MODELS), marks=pytest.mark.proof),
        pytest.param(1, 2, "torch", list(MODELS), marks=pytest.mark.proof),
    ],
    ids=["stage 3", "stage 2, some models", "stage 2", "stage 1"],
)
def test_gradients_are_those_of_one_process(pool, stage, accumulation, transport, models):
    config = settings(2, stage, 1, accumulation)
    config["parallel"]["transport"] = transport
    refuse_differences(pool, 2, models, config)


@pytest.mark.parametrize(
    ("partitioned", "replicated"),
    [
        (["ReadsHeadFirst"], ["CalledTwice"]),
        pytest.param(list(MODELS), list(MODELS), marks=pytest.mark.proof),
    ],
    ids=["some models", "all models"],
)
def test_secondary_partition_and_replicas(pool, partitioned, replicated):
    config = settings(4, 3, 1, 1)
    config["zero_optimization"]["zero_hpz_partition_size"] = 2
    refuse_differences(pool, 4, partitioned, config)
    refuse_differences(pool, 4, replicated, settings(4, 3, 2, 2))


def gathers(rank, world, name):
    """Runs in a worker: bytes that one micro-batch gathers, and bytes gathered in front of the second block."""
    model = model_of(name)
    config = settings(2, 3, 1, 1) | {"gradient_clipping": 0.0}
    config["parallel"]["transport"] = "torch"
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    held: list[int] = []
    model.blocks[1].register_forward_pre_hook(
        lambda *_: held.append(unsharded_parameter_bytes(model))
    )
    for _ in range(2):
        with count_traffic() as traffic:
            engine.train_batch(steps(1)[0][0])
    return traffic.bytes()["all_gather"], held[-1]


def test_each_end_is_gathered_once_and_freed(pool):
    """A block is gathered twice per micro-batch; an embedding, a head and the root once. In a block, no end is gathered."""
    found, held = pool.run(2, gathers, "Base")[0]
    model = model_of("Base")
    block = sum(8 * (-(-p.shape[0] // 2)) * 2 * p[0].numel() for p in model.blocks[0].parameters())
    ends = sum(
        8 * (-(-p.shape[0] // 2)) * 2 * p[0].numel()
        for name, p in model.named_parameters()
        if not name.startswith("blocks.")
    )
    assert found == (3 * 2 * block + ends) // 2
    assert held == block + sum(8 * p.numel() for p in model.norm.parameters())


def test_an_embedding_that_others_read_stays_gathered(pool):
    """It is gathered once per micro-batch, as the root is."""
    (plain, held), (read, kept) = (
        pool.run(2, gathers, "Base")[0],
        pool.run(2, gathers, "ReadsEmbedding")[0],
    )
    assert read == plain
    assert kept - held == 8 * (VOCABULARY + 1) * WIDTH


def two_forwards(rank, world, stage):
    """Runs in a worker: one backward of two forwards with an evaluation between, then a backward of each."""
    model = model_of("ReadsEmbedding")
    plait.parallelize(model, settings(2, stage, 1, 1))
    return {
        name: full_tensor_on_cpu(gradient) for name, gradient in _two_forwards(model, rank).items()
    }


def _two_forwards(model, rank):
    first, second = (steps(2)[step][rank]["input_ids"] for step in (0, 1))
    total = model(first).logits.square().mean() + model(second).logits.square().mean()
    with torch.no_grad():
        model(first)
    total.backward()
    one, other = model(first).logits.square().mean(), model(second).logits.tanh().mean()
    one.backward()
    other.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("stage", [2, 3])
def test_several_forwards_before_a_backward(pool, stage):
    wanted: dict[str, torch.Tensor] = {}
    for rank in range(2):
        for name, gradient in _two_forwards(model_of("ReadsEmbedding"), rank).items():
            wanted[name] = wanted.get(name, 0) + gradient / 2
    for found in pool.run(2, two_forwards, stage):
        close(found, wanted)


def penalised(model, read, ids):
    """A loss that reads a weight itself, after the forward."""
    return model(ids).logits.square().mean() + 0.3 * read(model).square().sum()


def penalty(rank, world, stage, leaf):
    """Runs in a worker."""
    model = model_of("Base")
    plait.parallelize(model, settings(2, stage, 1, 1))
    try:
        penalised(model, lambda m: m.get_parameter(leaf), steps(2)[0][rank]["input_ids"]).backward()
    except InputError as error:
        return str(error)
    return {
        name: full_tensor_on_cpu(p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }


@pytest.mark.parametrize(
    ("stage", "leaf"), [(1, "head.weight"), (2, "embed.weight"), (3, "head.weight")]
)
def test_a_loss_that_reads_a_weight(pool, stage, leaf):
    wanted: dict[str, torch.Tensor] = {}
    for rank in range(2):
        model = model_of("Base")
        penalised(model, lambda m: m.get_parameter(leaf), steps(2)[0][rank]["input_ids"]).backward()
        for name, p in model.named_parameters():
            wanted[name] = wanted.get(name, 0) + p.grad / 2
    for found in pool.run(2, penalty, stage, leaf):
        assert isinstance(found, dict)
        close(found, wanted)


def test_a_loss_that_reads_a_freed_embedding_is_refused(pool):
    for found in pool.run(2, penalty, 3, "embed.weight"):
        assert isinstance(found, str) and "embed.weight is read by the loss itself" in found


def early_penalty(rank, world, stage):
    """The error of a penalty that is computed before the forward. Runs in a worker."""
    model = model_of("Base")
    plait.parallelize(model, settings(2, stage, 1, 1))
    penalty = model.embed.weight.square().sum()
    with pytest.raises(InputError) as refused:
        (0.3 * penalty + model(steps(2)[0][rank]["input_ids"]).logits.square().mean()).backward()
    return str(refused.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_penalty_before_the_forward_is_refused(pool, stage):
    """Its advice is followed by `test_a_loss_that_reads_a_weight`."""
    for message in pool.run(2, early_penalty, stage):
        assert message.startswith("embed.weight is read by the loss itself (a penalty on weights?)")
        assert "read it after the model was called (below ZeRO stage 3 it is unsharded" in message


def mixing_losses(rank, world):
    """Messages about losses that multiply a weight by a mask. Runs in a worker."""
    model = model_of("Base")
    sharded = plait.parallelize(model, settings(2, 3, 1, 1))
    ids = steps(2)[0][rank]["input_ids"]

    def loss():
        mask = torch.ones(model.embed.weight.shape, dtype=torch.float64)
        return model(ids).logits.square().mean() + (model.embed.weight * mask).sum()

    said = []
    with pytest.raises(InputError) as refused, sharded.accumulate():
        loss()
    said.append(str(refused.value))
    with pytest.raises(InputError) as refused:
        sharded.forward_backward([{"input_ids": ids}], lambda output, batch: loss())
    said.append(str(refused.value))
    with pytest.raises(RuntimeError, match="got mixed") as raised:
        loss()
    report = StringIO()
    with redirect_stderr(report):
        sys.excepthook(raised.type, raised.value, raised.tb)
    said.append(report.getvalue())
    sharded.close()
    return said


def test_a_loss_that_mixes_a_shard_and_a_tensor_is_named(pool):
    """Inside a call of Plait by its error, elsewhere by a note under torch's message."""
    for said in pool.run(2, mixing_losses):
        for message in said:
            assert (
                "aten.mul.Tensor was given a full tensor together with one that is split" in message
            )
            assert "its parameters are shards (ZeRO stage 3)" in message
            assert "read no weight there" in message


def test_which_layers_are_units():
    """Tied weights and layers that compute something else stay in the root unit."""
    model = model_of("Base")
    blocks = tuple(f"blocks.{index}" for index in range(3))
    assert outer_units(model, blocks) == OuterUnits(("embed", "second"), "head")
    assert outer_units(model, ()) == OuterUnits()
    model.head.weight = model.embed.weight
    assert outer_units(model, blocks) == OuterUnits(("second",), None)
    model.second.max_norm = 1.0  # writes into the weight
    assert outer_units(model, blocks) == OuterUnits()
