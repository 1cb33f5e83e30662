"""Buffers that a forward changes are those of the first data-parallel rank, as torch's DistributedDataParallel has them."""

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

STEPS, LATE = 6, 2
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.05}}, "gradient_clipping": 0.0}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return x + self.norm(self.linear(x)).tanh()


class Net(nn.Module):
    """Running means, an average that is assigned anew and used, one that only begins later and on one rank, and constants."""

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
            if self.calls > 2 * LATE:
                self.late.add_(x.detach().mean())
        return self.head(x + self.average) * self.frequencies[0] * self.constant[0]


def net():
    torch.manual_seed(5)
    return Net().double()


def pieces(step, rank):
    """Two micro-batches of 4 for a rank."""
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


def under_ddp(rank, world):
    """torch's own: no_sync for the first micro-batch of a step. Rank 0's buffers after the last step."""
    model = net()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        first, last = pieces(step, rank)
        with wrapped.no_sync():
            (F.mse_loss(wrapped(first[0]), first[1]) / 2).backward()
        (F.mse_loss(wrapped(last[0]), last[1]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return buffers(model)


def under_plait(rank, world, stage):
    """Runs in a worker: whole steps; then a loop of one's own."""
    loss = plait.per_sample(lambda output, batch: F.mse_loss(output, batch[1], reduction="sum") / 2)
    engine = plait.initialize(net(), settings(world, stage, 1, 2, **SGD), loss_fn=loss)
    for step in range(STEPS):
        engine.train_batch(pieces(step, rank))
    found = {
        "names": engine.hooks.find(ChangingBuffers).names,
        "engine": buffers(engine.model),
        "ddp": under_ddp(rank, world),
    }
    config = settings(world, stage, 1, 1)
    sharded = plait.parallelize(net(), config)
    model = sharded.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        first, last = pieces(step, rank)
        with sharded.accumulate():
            (F.mse_loss(model(first[0]), first[1]) / 2).backward()
        (F.mse_loss(model(last[0]), last[1]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    found["loop"] = buffers(model)
    return {**found, "constant": constants(rank, world)}


def constants(rank, world):
    """What a model sends whose buffers do not change, after its first step."""
    model = nn.Sequential(nn.Linear(3, 3))
    model.register_buffer("frequencies", torch.full((5,), 1.0 + rank), persistent=False)
    mesh = plait.initialize(model, settings(world, 0, 1, 1, **SGD)).mesh
    assert torch.equal(model.frequencies, torch.ones(5)), "the first rank's, before any step"
    watched = ChangingBuffers(model, (), mesh, SAMPLE_AXES)
    sent = []
    for _ in range(3):
        with count_traffic() as traffic:
            watched.send()
        sent.append(dict(traffic.bytes()))
    return sent


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_are_the_first_ranks(pool, stage):
    """A15: against DistributedDataParallel, at the end of every step; constant buffers send nothing after the first."""
    first, second = pool.run(2, under_plait, stage)
    for name, wanted in first["ddp"].items():
        for found in (first["engine"], second["engine"], first["loop"]):
            torch.testing.assert_close(
                found[name],
                wanted,
                rtol=1e-9,
                atol=1e-12,
                msg=lambda text, name=name: f"{name}: {text}",
            )
    assert {
        "average",
        "late",
        "blocks.0.norm.running_mean",
        "blocks.1.norm.num_batches_tracked",
    } <= set(first["names"])
    assert not {"constant", "frequencies"} & set(first["names"])
    assert first["constant"][1:] == [{}, {}]


class Stem(nn.Module):
    """A running mean outside of the blocks, which every stage of a pipeline computes, and only the first one of what came in."""

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


def stem(rank, world):
    """Runs in a worker. The mean after two steps."""
    torch.manual_seed(7)
    loss = plait.per_sample(lambda output, batch: F.mse_loss(output, batch[1], reduction="sum") / 2)
    shape = {"parallel": {"pp": world}} if world > 1 else {}
    file = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, **SGD, **shape}
    engine = plait.initialize(Stem().double(), file, loss_fn=loss)
    for step in range(2):
        engine.train_batch(pieces(step, 0))
    return engine.model.mean.clone()


def test_a_buffer_of_the_stem_is_the_first_stages(pool):
    """On every stage of a pipeline, where later ones compute it of what they do not know."""
    (wanted,) = pool.run(1, stem)
    for found in pool.run(2, stem):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_a_model_of_an_own_loop_can_be_copied_and_saved():
    """What Plait hangs on a replicated model stays with it."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    sharded = plait.parallelize(model, {"zero_optimization": {"stage": 0}})
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied(torch.ones(2, 3)).sum().backward()
        torch.testing.assert_close(copied.state_dict()["0.weight"], model[0].weight)
    sharded.close()
