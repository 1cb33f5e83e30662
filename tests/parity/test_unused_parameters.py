"""Parameters that a step leaves unused: by every rank (the optimizer must skip them) and by some ranks only (the others' gradient
counts)."""

from __future__ import annotations

from typing import Any

import pytest

import plait
from plait.verify.parity import Trace, compare, engine_trace, reference_trace, worst
from tests.parity import cases
from tests.parity.data_parallel import CLIPPING, materialised, settings
from tests.pool import Pool


def steps(micro_batches: int) -> list[list[dict[str, Any]]]:
    """Step 0: nobody uses the side branch; step 1: only the last micro-batch does; step 2: all do; step 3: nobody again."""
    plan: list[list[dict[str, Any]]] = []
    for step, pieces in enumerate(cases.ragged_steps(micro_batches, steps=4, keys=())):
        uses = {0: lambda i: False, 1: lambda i: i == micro_batches - 1, 2: lambda i: True, 3: lambda i: False}[step]
        plan.append([{**piece, "side": uses(index)} for index, piece in enumerate(pieces)])
    return plan


def train(rank: int, world: int, config: dict[str, Any]) -> Trace | None:
    """Runs in a worker."""
    engine = plait.initialize(cases.build("plain", tied=True), config, loss_fn=plait.causal_lm_loss)
    dropped = {**cases.ragged_steps(1, steps=1, keys=())[0][0], "side": True}  # what it uses is not used by step 0
    engine.backward(plait.causal_lm_loss(engine(dropped["input_ids"], side=True), dropped)[0])
    engine.zero_grad()
    trace = engine_trace(engine, steps(world * config["gradient_accumulation_steps"]))
    return trace if rank == 0 else None


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unused_parameters_are_skipped(pool: Pool, stage: int, accumulation: int) -> None:
    """Gradients are None exactly where one process leaves them None."""
    found = pool.run(2, train, settings(2, stage, 1, accumulation))[0]
    wanted = reference_trace(
        materialised("plain", tied=True), steps(2 * accumulation), loss_fn=plait.causal_lm_loss, optimizer=cases.adamw, clipping=CLIPPING
    )
    assert wanted.gradients[0]["blocks.0.side.weight"] is None
    assert wanted.gradients[1]["blocks.0.side.weight"] is not None
    bar = worst(compare(wanted, found))
    assert bar.ok(1e-10), f"{bar.name}: {bar.error}"
