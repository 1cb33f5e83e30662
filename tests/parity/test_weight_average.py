"""A moving average of the weights, of every rank's own shards, and weight decay by a rule: as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from plait.verify.parity import full_tensor_on_cpu
from tests.parity import cases, tensor_parallel
from tests.parity.data_parallel import materialised, settings
from tests.parity.mean_losses import close, mean_loss

STEPS, MIX = 3, 0.3


def without_decay_of_vectors(parameters, *, decay=0.1):
    """As scripts write it: matrices decay, biases and norms do not. The rate is large, so that the rule is seen."""
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def averaged(average, model):
    """One step of the average, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            average[name].lerp_(parameter, MIX)


def on_plait(rank, world, config):
    """(weights, their average). Runs in a worker."""
    given = {key: value for key, value in config.items() if key != "optimizer"} | {
        "gradient_clipping": 0
    }
    engine = plait.initialize(
        cases.build("plain", tied=True), given, optimizer=without_decay_of_vectors
    )
    average = {
        name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()
    }
    for step in cases.ragged_steps(engine.dp_size, steps=STEPS, keys=()):
        engine.backward(mean_loss(engine, step[engine.dp_rank])[0])
        engine.step()
        averaged(average, engine.module)
    weights = {
        name: full_tensor_on_cpu(parameter) for name, parameter in engine.module.named_parameters()
    }
    return weights, {name: full_tensor_on_cpu(tensor) for name, tensor in average.items()}


def alone(batches, *, decay=0.1):
    """One process in plain torch, with as many batches in a step."""
    model = materialised("plain", tied=True)
    optimizer = without_decay_of_vectors(model.parameters(), decay=decay)
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in cases.ragged_steps(batches, steps=STEPS, keys=()):
        for piece in step:
            (mean_loss(model, piece)[0] / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged(average, model)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, average


CONFIGS = [
    *(pytest.param(settings(2, stage, 1, 1), 2, id=f"zero{stage}") for stage in (0, 1, 3)),
    pytest.param(
        tensor_parallel.settings(2, 2, 0, 1, 1, **tensor_parallel.plan("plain")), 1, id="tp2"
    ),
]


@pytest.mark.parametrize(("config", "batches"), CONFIGS)
def test_an_average_and_decay_by_a_rule(pool, config, batches):
    weights, average = alone(batches)
    assert any(not torch.allclose(average[name], weights[name], atol=1e-6) for name in weights)
    assert any(
        not torch.allclose(alone(batches, decay=0.0)[0][name], weights[name], atol=1e-6)
        for name in weights
    )
    for found, found_average in pool.run(2, on_plait, config):
        close(found, weights)
        close(found_average, average)
