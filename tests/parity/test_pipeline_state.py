"""Pipelines of models whose forward depends on more than its inputs and parameters: attributes, buffers, the loss's own reading."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from plait.errors import PlaitError
from plait.verify.parity import engine_trace
from tests.parity import cases, pipelines
from tests.parity.data_parallel import assert_same, plain_trace

CONFIG = pipelines.settings(1, 2, "1f1b", pp=2)


class StatefulModel(cases.PlainModel):
    """A model with settings, each of which one case uses."""

    def __init__(self):
        super().__init__(tied=False, layers=4)
        self.skip_blocks = False
        self.scale = 1.0
        self.counts: str | None = None
        self.steps_seen = 0
        self.skips_around = False
        self.aux: torch.Tensor | None = None
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, input_ids):
        hidden = self.embed(input_ids) * self.scale * (1 + self.steps_seen)
        if self.counts == "before":
            self.steps_seen += 1
        if self.counts == "buffer":
            hidden = hidden * self.temperature
        recorded = []
        if not self.skip_blocks:
            for block in self.blocks:
                hidden = block(hidden, False)
                recorded.append(hidden)
        if self.skips_around:
            hidden = hidden + recorded[0]
        if self.counts == "behind":
            self.steps_seen += 1
        if self.counts == "buffer":
            self.temperature.mul_(0.9)
        return cases.Output(self.head(hidden))


class AuxiliaryBlock(cases.Block):
    """A block that keeps a loss of its own as an attribute."""

    def forward(self, hidden, use_side):
        output = super().forward(hidden, use_side)
        self.aux_loss = output.square().mean()
        return output


def build():
    """The model in float64, with the same weights on every call."""
    torch.manual_seed(7)
    return StatefulModel().to(torch.float64)


def penalised(model):
    """A loss with a penalty on all parameters."""

    def loss(output, batch):
        total, weight = plait.causal_lm_loss(output, batch)
        return total + 0.01 * sum(p.square().sum() for p in model.parameters()), weight

    return loss


def error_of(rank, world, case):
    """Runs in a worker. Returns the error of the first or second step."""
    model = build()
    loss: Any = plait.causal_lm_loss
    if case == "auxiliary":
        model.blocks = torch.nn.ModuleList(AuxiliaryBlock(12) for _ in range(4)).to(torch.float64)

        def loss(output, batch):
            total, weight = plait.causal_lm_loss(output, batch)
            return total + sum(block.aux_loss for block in model.blocks), weight

    elif case == "penalty":
        loss = penalised(model)
    elif case == "around":
        model.skips_around = True
    elif case != "skip":
        model.counts = case
    plan = cases.ragged_steps(2, steps=2, keys=())
    try:
        engine = plait.initialize(
            model, CONFIG, loss_fn=plait.WeightedLoss(loss, plait.causal_lm_loss.weight)
        )
        engine.train_batch(plan[0])
        model.skip_blocks = case == "skip"
        engine.train_batch(plan[1])
    except PlaitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("skip", "which does not run in a forward of this batch"),
        ("behind", "sets model.steps_seen after blocks.3"),
        ("buffer", "changes the buffer temperature after blocks.3"),
        ("penalty", "the loss reads parameters of the model"),
        ("auxiliary", "the loss cannot be computed from only the model's output and the batch"),
        ("around", "not only through the chain of blocks"),
    ],
)
def test_state_that_stages_cannot_share_is_refused(pool, case, words):
    for message in pool.run(2, error_of, case):
        assert message.startswith("ModelError: parallel.pp"), message
        assert words in message, message
        assert "parallel.pp = 1" in message, message


class Rescaled:
    """Steps between which an attribute of the model changes."""

    def __init__(self, model):
        self._model = model

    def __iter__(self):
        for index, step in enumerate(cases.ragged_steps(2, steps=3, keys=())):
            self._model.scale = 1.0 + index
            self._model.counts = "before"
            yield step


def rescaled(rank, world):
    """Runs in a worker."""
    model = build()
    engine = plait.initialize(model, CONFIG, loss_fn=plait.causal_lm_loss)
    trace = engine_trace(engine, Rescaled(model))  # type: ignore[arg-type]
    return trace if rank == 0 else None


def test_attributes_that_all_stages_change(pool):
    trace = pool.run(2, rescaled)[0]
    model = build()
    expected = plain_trace(model, Rescaled(model))
    assert_same(expected, trace)
