"""Ranks with different models or settings are refused with the first difference.

Models that cannot train correctly on several ranks are refused by name.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import plait
from tests.parity import cases
from tests.parity.data_parallel import settings


def message_of(model, config, **arguments):
    """Return the message with which `initialize` refuses its arguments."""
    try:
        with warnings.catch_warnings(record=True):
            plait.initialize(model, config, **arguments)
    except plait.PlaitError as error:
        return str(error)
    return ""


def different(rank, world, stage):
    """Return the messages for four differences of rank 1. Runs on every rank."""
    plain = partial(cases.build, "plain", tied=True)
    config = settings(world, stage, 1, 1)

    transposed = plain()
    untied = plain()
    other_config = config
    if rank == 1:
        up = transposed.blocks[1].up
        up.weight = nn.Parameter(up.weight.detach().t().contiguous())
        untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
        other_config = {**config, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}

    sgd = partial(torch.optim.SGD, lr=0.1 * (1 + rank))
    return [
        message_of(transposed, config),
        message_of(untied, config),
        message_of(plain(), other_config),
        message_of(plain(), config, optimizer=sgd),
    ]


@pytest.mark.parametrize("stage", [0, 3])
def test_the_first_difference_of_ranks_is_named(pool, stage):
    first, second = pool.run(2, different, stage)
    assert first == second
    expected = (
        "rank 1 has `blocks.1.up.weight` float64 [12, 25], rank 0 has float64 [25, 12]",
        "rank 1 has `head.weight` float64 [101, 12], rank 0 has tied to `embed.weight`",
        "rank 1 has setting `optimizer.params.lr` 0.5, rank 0 has 0.001",
        "rank 1 has `lr` of optimizer group 0 0.2, rank 0 has 0.1",
    )
    for text, message in zip(expected, first, strict=True):
        assert text in message.replace(" on meta", "")


class LossWithTemperature(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output, batch):
        return output.sum() * self.temperature, 1

    def weight(self, batch):
        return 1


REFUSED = {
    "max_norm": "`0` has max_norm = 1: it changes its weight in the forward",
    "scale_grad_by_freq": "`0` has scale_grad_by_freq=True",
    "loss": "the loss LossWithTemperature has a trainable parameter, `temperature`",
    "wrapped loss": "temperature",
    "its optimizer": "holds a parameter of shape () that is not (or no longer) part of the model",
    "a list": "not a list",
}


def misuse(rank, world):
    """Return messages, warnings and the seed of a model whose loss is a part of it.

    Runs on every rank.
    """
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": cases.OPTIMIZER,
        "parallel": {"dp_replicate": world},
    }
    loss = LossWithTemperature()

    def with_foreign_parameters(parameters):
        return torch.optim.SGD([*parameters, *loss.parameters()], lr=1.0)

    arguments: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "max_norm": (nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), {}),
        "scale_grad_by_freq": (nn.Sequential(nn.EmbeddingBag(4, 2, scale_grad_by_freq=True)), {}),
        "loss": (nn.Linear(2, 2), {"loss_fn": loss}),
        "wrapped loss": (nn.Linear(2, 2), {"loss_fn": plait.per_sample(loss)}),
        "its optimizer": (nn.Linear(2, 2), {"optimizer": with_foreign_parameters}),
        "a list": (nn.Linear(2, 2), {"optimizer": [1]}),
    }
    messages = {
        name: message_of(model, config, **keywords) for name, (model, keywords) in arguments.items()
    }

    torch.manual_seed(77 + rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = plait.initialize(
            nn.ModuleDict({"net": nn.Linear(2, 2), "loss": loss}),
            config,
            loss_fn=loss,
            optimizer=partial(torch.optim.SGD, lr=1.0),
        )
    unused = [str(w.message) for w in caught if "configuration is not used" in str(w.message)]
    seed = (engine.config.seed, engine.config.sources["run.seed"], torch.initial_seed())
    return messages, unused, seed


def test_misuse_is_named(pool):
    """An unused section is reported once, and the seed is that of torch.manual_seed."""
    results = pool.run(2, misuse)
    for messages, _, seed in results:
        for name, text in REFUSED.items():
            assert text in messages[name], name
        assert seed[:2] == (77, "torch.manual_seed, on rank 0")
    (_, unused, seed), (_, unused_on_rank_1, seed_of_rank_1) = results
    assert len(unused) == 1 and not unused_on_rank_1
    assert unused[0].startswith("`optimizer` of the configuration is not used")
    # Data-parallel ranks draw different dropout masks.
    assert seed[2] != seed_of_rank_1[2]
