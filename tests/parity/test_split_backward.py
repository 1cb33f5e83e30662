"""Pipelines whose backward is split in halves, against one process in float64.

The models have gradients that do not all pass through the input of a stage.
"""

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


class DetachedNorm(cases.Block):
    """Trains only what follows its norm."""

    def forward(self, hidden, use_side):
        inner: torch.Tensor = self.down(F.gelu(self.up(self.norm(hidden).detach())))
        return inner


class Autoencoder(cases.Block):
    """Two layers multiply by one weight, which is registered after their biases."""

    def __init__(self, width):
        super().__init__(width)
        self.encoder_bias = nn.Parameter(torch.rand(2 * width))
        self.decoder_bias = nn.Parameter(torch.rand(width))
        self.weight = nn.Parameter(torch.rand(2 * width, width))

    def forward(self, hidden, use_side):
        code = torch.tanh(F.linear(hidden, self.weight, self.encoder_bias))
        decoded = F.linear(code, self.weight.t(), self.decoder_bias)
        return super().forward(hidden, use_side) + decoded


class ReentrantCheckpoint(cases.Block):
    """Recomputes itself with torch's older implementation."""

    def forward(self, hidden, use_side):
        output: torch.Tensor = checkpoint(super().forward, hidden, use_side, use_reentrant=True)
        return output


class ScaledGradient(cases.Block):
    """Scales the gradient of its norm's output with a hook."""

    def forward(self, hidden, use_side):
        inner = self.norm(hidden)
        if inner.requires_grad:
            inner.register_hook(lambda gradient: gradient * 0.5)
        output: torch.Tensor = hidden + self.down(F.gelu(self.up(inner)))
        return output


class Model(cases.PlainModel):
    """A plain model with two blocks per stage, of which those at some indices are replaced."""

    def __init__(self, block=cases.Block, indices=()):
        super().__init__(tied=False, layers=LAYERS)
        for index in indices:
            self.blocks[index] = block(12)


class DetachedBetweenBlocks(Model):
    """Detaches the input of one block."""

    def __init__(self, index):
        super().__init__()
        self.index = index

    def forward(self, input_ids, side=False):
        hidden = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden.detach() if index == self.index else hidden, side)
        return cases.Output(self.head(hidden))


class HeadOnDetachedFeatures(Model):
    """Trains its head alone."""

    def forward(self, input_ids, side=False):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, side)
        return cases.Output(self.head(torch.tanh(hidden).detach()))


class PairBlock(cases.Block):
    """Returns a second tensor, computed from parameters and detached features."""

    def __init__(self, width):
        super().__init__(width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, pair, use_side):
        hidden, second = pair
        next_second = self.side(hidden.detach()) * self.scale
        return super().forward(hidden + torch.tanh(second) * self.scale, use_side), next_second


class PairModel(Model):
    """Passes two tensors from block to block."""

    def __init__(self):
        super().__init__(PairBlock, range(LAYERS))

    def forward(self, input_ids, side=False):
        hidden = self.embed(input_ids)
        pair = hidden, hidden
        for block in self.blocks:
            pair = block(pair, side)
        return cases.Output(self.head(pair[0] + pair[1]))


MIDDLE = (3, 6)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "detach inside a block": lambda: Model(DetachedNorm, (3,)),
    "detach inside the last block": lambda: Model(DetachedNorm, (7,)),
    "detach between blocks of a stage": lambda: DetachedBetweenBlocks(5),
    "detach between blocks of two stages": lambda: DetachedBetweenBlocks(4),
    "head on detached features": HeadOnDetachedFeatures,
    "tied autoencoder": lambda: Model(Autoencoder, MIDDLE),
    "reentrant checkpoint": lambda: Model(ReentrantCheckpoint, MIDDLE),
    "tensor hook": lambda: Model(ScaledGradient, MIDDLE),
    "two tensors": PairModel,
}


def build(kind):
    torch.manual_seed(7)
    return MODELS[kind]().double()


def steps_of(config):
    micro_batches = dp_of(config) * config["gradient_accumulation_steps"]
    return cases.steps_for("plain", micro_batches, steps=STEPS)


def train(rank, world, kinds, config):
    """Runs on every rank."""
    traces = {}
    for kind in kinds:
        model = build(kind)
        engine = cases.engine(model, config, optimizer=cases.sgd(list(model.parameters())))
        traces[kind] = engine_trace(engine, steps_of(config))
    return traces if rank == 0 else {}


def with_zeros(trace):
    """Put zeros where a parameter has no gradient.

    A stage that computes no gradient of its inputs sends zeros, so earlier stages have zeros where
    one process has None.
    """
    steps = []
    for gradients in trace.gradients:
        filled = dict(gradients)
        for name, gradient in gradients.items():
            if gradient is None:
                filled[name] = torch.zeros_like(trace.parameters[name])
        steps.append(filled)
    return replace(trace, gradients=tuple(steps))


def check(pool, world, kinds, config):
    """Compare losses, norms, gradients and parameters with one process."""
    traces = pool.run(world, train, kinds, config)[0]
    for kind in kinds:
        expected = plain_trace(build(kind), steps_of(config), optimizer=cases.sgd)
        assert_same(with_zeros(expected), with_zeros(traces[kind]), where=kind)


@pytest.mark.parametrize(
    "schedule", proof_after(1, ["zbv", "interleaved-zero-bubble", "dualpipev"])
)
def test_gradients_of_both_halves(pool, schedule):
    """A node that runs in both halves calls its hooks once."""
    check(pool, 2, list(MODELS), settings(0, 4, schedule, pp=2))


def test_sharded_gradients(pool):
    """Units reduce the gradients of both halves at the end of the second."""
    kinds = ["tied autoencoder", "two tensors"]
    check(pool, 4, kinds, settings(2, 4, "zbv", pp=2, dp_shard=2))
