"""Pipelines of models whose forward depends on more than its inputs and parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from plait.errors import ModelError
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
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, input_ids):
        hidden = self.embed(input_ids) * self.scale * (1 + self.steps_seen)
        if self.counts == "before":
            self.steps_seen += 1
        if self.counts == "buffer":
            hidden = hidden * self.temperature

        outputs = []
        if not self.skip_blocks:
            for block in self.blocks:
                hidden = block(hidden, False)
                outputs.append(hidden)
        if self.skips_around:
            hidden = hidden + outputs[0]

        if self.counts == "behind":
            self.steps_seen += 1
        if self.counts == "buffer":
            self.temperature.mul_(0.9)
        return cases.Output(self.head(hidden))


class AuxiliaryBlock(cases.Block):
    """A block that stores an auxiliary loss as an attribute."""

    def forward(self, hidden, use_side):
        output = super().forward(hidden, use_side)
        self.aux_loss = output.square().mean()
        return output


def build():
    torch.manual_seed(7)
    return StatefulModel().to(torch.float64)


def loss_with(term):
    """Return the loss of a language model plus a term that reads the model."""

    def loss(output, batch):
        total, weight = plait.causal_lm_loss(output, batch)
        return total + term(), weight

    return plait.WeightedLoss(loss, plait.causal_lm_loss.weight)


def error_of(rank, world, case):
    """Return the message of the first or second step. Runs on every rank."""
    model = build()
    loss: Any = plait.causal_lm_loss
    if case == "auxiliary":
        model.blocks = torch.nn.ModuleList(AuxiliaryBlock(12) for _ in range(4)).to(torch.float64)
        loss = loss_with(lambda: sum(block.aux_loss for block in model.blocks))
    elif case == "penalty":
        loss = loss_with(lambda: 0.01 * sum(p.square().sum() for p in model.parameters()))
    elif case == "around":
        model.skips_around = True
    elif case != "skip":
        model.counts = case

    def train_two_steps():
        engine = plait.initialize(model, CONFIG, loss_fn=loss)
        for step in cases.ragged_steps(2, steps=2, keys=()):
            engine.train_batch(step)
            model.skip_blocks = case == "skip"

    with pytest.raises(ModelError) as error:
        train_two_steps()
    return str(error.value)


@pytest.mark.parametrize(
    ("case", "fragment"),
    [
        ("skip", "which does not run in a forward of this batch"),
        ("behind", "sets model.steps_seen after blocks.3"),
        ("buffer", "changes the buffer temperature after blocks.3"),
        ("penalty", "the loss reads parameters of the model"),
        ("auxiliary", "the loss cannot be computed from only the model's output and the batch"),
        ("around", "not only through the chain of blocks"),
    ],
)
def test_state_that_stages_cannot_share_is_refused(pool, case, fragment):
    for message in pool.run(2, error_of, case):
        assert message.startswith("parallel.pp"), message
        assert fragment in message, message
        assert "parallel.pp = 1" in message, message


class RescaledSteps:
    """Steps between which attributes of the model change."""

    def __init__(self, model):
        self._model = model

    def __iter__(self):
        for index, step in enumerate(cases.ragged_steps(2, steps=3, keys=())):
            self._model.scale = 1.0 + index
            self._model.counts = "before"
            yield step


def train_rescaled(rank, world):
    """Runs on every rank."""
    model = build()
    engine = plait.initialize(model, CONFIG, loss_fn=plait.causal_lm_loss)
    trace = engine_trace(engine, RescaledSteps(model))  # type: ignore[arg-type]
    return trace if rank == 0 else None


def test_attributes_that_all_stages_change(pool):
    actual = pool.run(2, train_rescaled)[0]
    model = build()
    assert_same(plain_trace(model, RescaledSteps(model)), actual)
