"""Pipelines whose backward is split, for models whose gradients do not all come through a stage's input, against one process in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from plait.verify.parity import engine_trace
from tests.covers import proof_after
from tests.parity import cases
from tests.parity.data_parallel import assert_same, plain_trace
from tests.parity.pipelines import LAYERS, STEPS, dp_of, settings


class DetachesInside(cases.Block):
    """Trains what follows its norm, and nothing before."""

    def forward(self, hidden, use_side):
        inner: torch.Tensor = self.down(F.gelu(self.up(self.norm(hidden).detach())))
        return inner


class Autoencoder(cases.Block):
    """Both of its layers multiply by one weight, which is registered after their biases."""

    def __init__(self, width):
        super().__init__(width)
        self.encoded = nn.Parameter(torch.rand(2 * width))
        self.decoded = nn.Parameter(torch.rand(width))
        self.weight = nn.Parameter(torch.rand(2 * width, width))

    def forward(self, hidden, use_side):
        code = torch.tanh(F.linear(hidden, self.weight, self.encoded))
        return super().forward(hidden, use_side) + F.linear(code, self.weight.t(), self.decoded)


class Checkpointed(cases.Block):
    """Recomputes itself as models did before torch had another implementation."""

    def forward(self, hidden, use_side):
        output: torch.Tensor = checkpoint(super().forward, hidden, use_side, use_reentrant=True)
        return output


class Scaled(cases.Block):
    """Scales the gradient of its norm's output with a hook."""

    def forward(self, hidden, use_side):
        inner = self.norm(hidden)
        if inner.requires_grad:
            inner.register_hook(lambda gradient: gradient * 0.5)
        output: torch.Tensor = hidden + self.down(F.gelu(self.up(inner)))
        return output


class Model(cases.PlainModel):
    """A plain model, of which some blocks are replaced."""

    def __init__(self, replaced=None, at=()):
        super().__init__(tied=False, layers=LAYERS)
        for index in at:
            assert replaced is not None
            self.blocks[index] = replaced(12)


class DetachesBetween(Model):
    """Detaches before one of its blocks."""

    def __init__(self, before):
        super().__init__()
        self.before = before

    def forward(self, input_ids, side=False):
        hidden = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden.detach() if index == self.before else hidden, side)
        return cases.Output(self.head(hidden))


class HeadAlone(Model):
    """Trains its head on features that it detaches."""

    def forward(self, input_ids, side=False):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, side)
        return cases.Output(self.head(torch.tanh(hidden).detach()))


class Pair(cases.Block):
    """Hands on a second tensor, which follows from parameters and from detached features."""

    def __init__(self, width):
        super().__init__(width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, pair, use_side):
        hidden, other = pair
        beside = self.side(hidden.detach()) * self.scale
        return super().forward(hidden + torch.tanh(other) * self.scale, use_side), beside


class Pairs(Model):
    """Passes two tensors from block to block."""

    def __init__(self):
        super().__init__(Pair, tuple(range(LAYERS)))

    def forward(self, input_ids, side=False):
        hidden = self.embed(input_ids)
        pair = hidden, hidden
        for block in self.blocks:
            pair = block(pair, side)
        return cases.Output(self.head(pair[0] + pair[1]))


MIDDLE = (3, 6)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "detach inside a block": lambda: Model(DetachesInside, (3,)),
    "detach inside the last block": lambda: Model(DetachesInside, (7,)),
    "detach between blocks of a stage": lambda: DetachesBetween(5),
    "detach between blocks of two stages": lambda: DetachesBetween(4),
    "head on detached features": HeadAlone,
    "tied autoencoder": lambda: Model(Autoencoder, MIDDLE),
    "reentrant checkpoint": lambda: Model(Checkpointed, MIDDLE),
    "tensor hook": lambda: Model(Scaled, MIDDLE),
    "two tensors": Pairs,
}
"""Of two blocks per stage."""


def model_of(kind):
    """With the same weights everywhere."""
    torch.manual_seed(7)
    return MODELS[kind]().double()


def train(rank, world, kinds, config):
    """Runs in a worker."""
    traces = {}
    for kind in kinds:
        model = model_of(kind)
        engine = cases.engine(model, config, optimizer=cases.sgd(list(model.parameters())))
        traces[kind] = engine_trace(engine, steps_of(config))
    return traces if rank == 0 else {}


def steps_of(config):
    """Micro-batches of all ranks, by step."""
    return cases.steps_for(
        "plain", dp_of(config) * config["gradient_accumulation_steps"], steps=STEPS
    )


def with_zeros(trace):
    """Put zeros where a parameter has no gradient.

    A stage that computes no gradient of its inputs sends zeros, so earlier stages have zeros where
    one process has None.
    """
    filled = [
        {
            name: torch.zeros_like(trace.parameters[name]) if tensor is None else tensor
            for name, tensor in step.items()
        }
        for step in trace.gradients
    ]
    return replace(trace, gradients=tuple(filled))


def check(pool, world, kinds, config):
    """Compare losses, norms, gradients and parameters with one process."""
    found = pool.run(world, train, kinds, config)[0]
    for kind in kinds:
        wanted = plain_trace(model_of(kind), steps_of(config), optimizer=cases.sgd)
        assert_same(with_zeros(wanted), with_zeros(found[kind]), where=kind)


@pytest.mark.parametrize(
    "schedule", proof_after(1, ["zbv", "interleaved-zero-bubble", "dualpipev"])
)
def test_gradients_of_both_halves(pool, schedule):
    """Parameters whose path to a stage's output meets no path from its input; a tied autoencoder whose biases come before its weight;
    blocks that run a backward of their own; a hook that scales a gradient once, though the node runs in both halves."""
    check(pool, 2, list(MODELS), settings(0, 4, schedule, pp=2))


def test_sharded_gradients(pool):
    """Units reduce at the end of the second half what came in either."""
    kinds = ["tied autoencoder", "two tensors"]
    check(pool, 4, kinds, settings(2, 4, "zbv", pp=2, dp_shard=2))
