"""Ranks that were given different things are named before anything is exchanged; what cannot train rightly is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import plait
from tests.parity import cases
from tests.parity.data_parallel import settings


def transposed(model, _):
    block = model.blocks[1]
    block.up.weight = nn.Parameter(block.up.weight.detach().t().contiguous())


def untied(model, _):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def another_rate(_, config):
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.5}}


CHANGES = [transposed, untied, another_rate]


def differing(rank, world, stage):
    """Runs in a worker: rank 1 alone builds something else, then the optimizers differ."""
    said = []
    for change in CHANGES:
        model, config = cases.build("plain", tied=True), settings(world, stage, 1, 1)
        if rank == 1:
            change(model, config)
        said.append(problem(model, config))
    said.append(
        problem(
            cases.build("plain", tied=True), settings(world, stage, 1, 1), rate=0.1 * (1 + rank)
        )
    )
    return said


def problem(model, config, *, rate=None):
    more = (
        {}
        if rate is None
        else {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=rate)}
    )
    try:
        with warnings.catch_warnings(record=True):
            plait.initialize(model, config, **more)
    except plait.PlaitError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 3])
def test_the_first_difference_is_named(pool, stage):
    """On every rank alike, at every stage: "ranks built differently" under A's misuse."""
    first, second = pool.run(2, differing, stage)
    assert first == second
    shape, tie, setting, rate = (said.replace(" on meta", "") for said in first)
    assert "rank 1 has `blocks.1.up.weight` float64 [12, 25], rank 0 has float64 [25, 12]" in shape
    assert "rank 1 has `head.weight` float64 [101, 12], rank 0 has tied to `embed.weight`" in tie
    assert "rank 1 has setting `optimizer.params.lr` 0.5, rank 0 has 0.001" in setting
    assert "rank 1 has `lr` of optimizer group 0 0.2, rank 0 has 0.1" in rate


class Tempered(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output, batch):
        return output.sum() * self.temperature, 1

    def weight(self, batch):
        return 1


def misuse(rank, world):
    """Runs in a worker."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": cases.OPTIMIZER,
        "parallel": {"dp_replicate": world},
    }
    said: dict[str, Any] = {}
    loss = Tempered()
    models: dict[str, Any] = {
        "max_norm": (nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), {}),
        "frequency": (nn.Sequential(nn.EmbeddingBag(4, 2, scale_grad_by_freq=True)), {}),
        "loss": (nn.Linear(2, 2), {"loss_fn": loss}),
        "wrapped loss": (nn.Linear(2, 2), {"loss_fn": plait.per_sample(loss)}),
        "its optimizer": (
            nn.Linear(2, 2),
            {"optimizer": lambda given: torch.optim.SGD([*given, *loss.parameters()], lr=1.0)},
        ),
        "no optimizer": (nn.Linear(2, 2), {"optimizer": [1]}),
    }
    for name, (model, more) in models.items():
        try:
            plait.initialize(model, config, **more)
        except plait.PlaitError as error:
            said[name] = str(error)
    part = nn.ModuleDict({"net": nn.Linear(2, 2), "loss": loss})
    torch.manual_seed(77 + rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = plait.initialize(
            part, config, loss_fn=loss, optimizer=lambda given: torch.optim.SGD(given, lr=1.0)
        )
    said["warned"] = [
        str(warning.message)
        for warning in caught
        if "configuration is not used" in str(warning.message)
    ]
    said["seed"] = (engine.config.seed, engine.config.sources["run.seed"], torch.initial_seed())
    return said


def test_misuse_is_named(pool):
    """A's misuse paragraph, and A26: a section that is not used is said once, and torch.manual_seed decides on dropout."""
    first, second = pool.run(2, misuse)
    for said in (first, second):
        assert "`0` has max_norm = 1: it changes its weight in the forward" in said["max_norm"]
        assert "`0` has scale_grad_by_freq=True" in said["frequency"]
        assert (
            "the loss Tempered has a trainable parameter, `temperature`" in said["loss"]
            and "temperature" in said["wrapped loss"]
        )
        assert (
            "holds a parameter of shape () that is not (or no longer) part of the model"
            in said["its optimizer"]
        )
        assert "not a list" in said["no optimizer"]
    (warned,) = first["warned"]
    assert (
        warned.startswith("`optimizer` of the configuration is not used") and not second["warned"]
    )
    assert first["seed"][:2] == second["seed"][:2] == (77, "torch.manual_seed, on rank 0")
    assert first["seed"][2] != second["seed"][2], "data-parallel ranks draw different masks"
