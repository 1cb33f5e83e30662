"""Optimizers of every kind of state, and a run in two halves with a checkpoint between them."""

from __future__ import annotations

from typing import Any

import torch

from tests.parity import cases

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.1},
    "Muon": {"lr": 1e-2},
}


def two_parts(world, config, zeros, checkpoints):
    """Train two steps, save, and go on with a new engine for two more. Runs on every rank.

    Each half has its own `zero_optimization` section in `zeros`. Yields each engine after its half.
    """
    for half, zero in enumerate(zeros):
        model = cases.build("llama", tied=True, dtype=torch.float32)
        engine = cases.engine(model, {**config, "zero_optimization": zero})
        if half:
            assert engine.load_checkpoint(checkpoints) is not None
        for step in cases.ragged_steps(world):
            engine.train_batch([step[engine.dp_rank]])
        if not half:
            engine.save_checkpoint(checkpoints)
        yield engine


def optimizer(states):
    """Return the optimizer section of the parity tests with a format of its states."""
    return {**cases.OPTIMIZER, "states": states}
