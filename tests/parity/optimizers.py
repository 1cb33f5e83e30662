"""Optimizers of every kind of state, and a run in two parts with a checkpoint between them."""

from __future__ import annotations

from typing import Any

import torch

import plait
from tests.parity import cases

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.1},
    "Muon": {"lr": 1e-2},
}


def two_parts(world, config, zeros, checkpoints):
    """Two steps and a checkpoint, then a new engine and two more; each of the two with its `zero_optimization`: the engine after each.
    Runs in a worker."""
    for part, zero in enumerate(zeros):
        model = cases.build("llama", tied=True, dtype=torch.float32)
        engine = plait.initialize(
            model, {**config, "zero_optimization": zero}, loss_fn=plait.causal_lm_loss
        )
        if part:
            assert engine.load_checkpoint(checkpoints) is not None
        for step in cases.ragged_steps(world):
            engine.train_batch([step[engine.dp_rank]])
        if not part:
            engine.save_checkpoint(checkpoints)
        yield engine


def optimizer(states):
    return {**cases.OPTIMIZER, "states": states}
