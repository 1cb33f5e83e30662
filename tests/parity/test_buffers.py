"""Buffers that a forward changes are those of the first data-parallel rank, as under DDP."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import plait
from plait.cluster.layout import SAMPLE_AXES
from plait.parallel.data.buffers import ChangingBuffers
from tests.measured.traffic import count_traffic
from tests.parity.data_parallel import settings

STEPS = 6
FIRST_LATE_STEP = 2
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.05}}, "gradient_clipping": 0.0}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return x + self.norm(self.linear(x)).tanh()


class Net(nn.Module):
    """A model with buffers of every kind.

    It has the running means of norms, an average that is assigned anew and used, a buffer that only
    changes after some steps, and constants.
    """

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(3, 2)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("late", torch.zeros(2))
        self.register_buffer("constant", torch.ones(4))
        self.register_buffer("frequencies", torch.ones(5), persistent=False)
        self.calls = 0

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
            self.calls += 1
            if self.calls > 2 * FIRST_LATE_STEP:
                self.late.add_(x.detach().mean())
        return self.head(x + self.average) * self.frequencies[0] * self.constant[0]


def net():
    torch.manual_seed(5)
    return Net().double()


def micro_batches(step, rank):
    """Return two micro-batches of four samples."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [
        (
            torch.randn(4, 3, generator=generator).double(),
            torch.randn(4, 2, generator=generator).double(),
        )
        for _ in range(2)
    ]


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def train(model, accumulate, rank):
    """Train in a plain loop whose first micro-batch of a step is in a context without reduction."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        first, last = micro_batches(step, rank)
        with accumulate():
            (F.mse_loss(model(first[0]), first[1]) / 2).backward()
        (F.mse_loss(model(last[0]), last[1]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def sum_of_means(output, batch):
    return F.mse_loss(output, batch[1], reduction="sum") / 2


def trained_buffers(rank, world, stage):
    """Return the buffers under DDP, of `train_batch` and of a loop. Runs on every rank."""
    ddp_model = net()
    ddp = DistributedDataParallel(ddp_model)
    train(ddp, ddp.no_sync, rank)

    engine = plait.initialize(
        net(), settings(world, stage, 1, 2, **SGD), loss_fn=plait.per_sample(sum_of_means)
    )
    for step in range(STEPS):
        engine.train_batch(micro_batches(step, rank))

    sharded = plait.parallelize(net(), settings(world, stage, 1, 1))
    train(sharded.model, sharded.accumulate, rank)
    return {
        "names": engine.hooks.find(ChangingBuffers).names,
        "ddp": buffers(ddp_model),
        "engine": buffers(engine.model),
        "loop": buffers(sharded.model),
        "constant": bytes_of_constants(rank, world),
    }


def bytes_of_constants(rank, world):
    """Return what three steps send of a model whose buffers do not change."""
    model = nn.Sequential(nn.Linear(3, 3))
    model.register_buffer("frequencies", torch.full((5,), 1.0 + rank), persistent=False)
    mesh = plait.initialize(model, settings(world, 0, 1, 1, **SGD)).mesh
    # Buffers are those of the first rank before any step.
    assert torch.equal(model.frequencies, torch.ones(5))
    changing = ChangingBuffers(model, (), mesh, SAMPLE_AXES)
    sent = []
    for _ in range(3):
        with count_traffic() as traffic:
            changing.send()
        sent.append(dict(traffic.bytes()))
    return sent


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_are_the_first_ranks(pool, stage):
    """Constant buffers send nothing after the first step."""
    first, second = pool.run(2, trained_buffers, stage)
    for actual in (first["engine"], second["engine"], first["loop"]):
        torch.testing.assert_close(actual, first["ddp"], rtol=1e-9, atol=1e-12)
    names = set(first["names"])
    assert {"average", "late"} <= names
    assert {"blocks.0.norm.running_mean", "blocks.1.norm.num_batches_tracked"} <= names
    assert not {"constant", "frequencies"} & names
    assert first["constant"][1:] == [{}, {}]


class Stem(nn.Module):
    """A model with a running mean outside of its blocks.

    Every stage of a pipeline computes it, but only the first one from the input.
    """

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.head = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        hidden = self.stem(x)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return self.head(hidden)


def running_mean(rank, world):
    """Return the mean after two steps. Runs on every rank."""
    torch.manual_seed(7)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, **SGD}
    if world > 1:
        config["parallel"] = {"pp": world}
    engine = plait.initialize(Stem().double(), config, loss_fn=plait.per_sample(sum_of_means))
    for step in range(2):
        engine.train_batch(micro_batches(step, 0))
    return engine.model.mean.clone()


def test_a_buffer_of_the_stem_is_the_first_stages(pool):
    expected = pool.run(1, running_mean)[0]
    for actual in pool.run(2, running_mean):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def test_a_replicated_model_can_be_copied_and_saved():
    """Nothing that Plait attaches to the model prevents it."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    sharded = plait.parallelize(model, {"zero_optimization": {"stage": 0}})
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied(torch.ones(2, 3)).sum().backward()
        torch.testing.assert_close(copied.state_dict()["0.weight"], model[0].weight)
    sharded.close()
