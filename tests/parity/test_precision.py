"""Mixed precision: fp16's loss scale and skipped steps, and closeness to float32."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import pytest
import torch

import plait
from tests.measured.traffic import count_traffic
from tests.parity import cases
from tests.parity.data_parallel import materialised, settings
from tests.parity.full_tensors import assert_equal, full_weights, names_of_differences

FP16 = {
    "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
}
StepRecord = namedtuple("StepRecord", "scale skipped changed norm loss")


class InfiniteLoss:
    """The loss of a language model with an infinite gradient."""

    def __call__(self, output, batch):
        total, weight = plait.causal_lm_loss(output, batch)
        return total * 1e38 * 1e38, weight

    def weight(self, batch):
        return plait.causal_lm_loss.weight(batch)


def train(rank, world, config, overflow_at, steps):
    """Train, with an infinite loss on the last rank alone in step `overflow_at`.

    Runs on every rank. Returns the record of each step, the dtypes of the traffic by collective,
    and the final weights.
    """
    engine = cases.engine(cases.build("plain", tied=True, dtype=torch.float32), config)
    history = []
    before = full_weights(engine.model)
    for index, step in enumerate(cases.ragged_steps(world, steps=steps, keys=())):
        if index == overflow_at and rank == world - 1:
            engine.loss_fn = InfiniteLoss()
        with count_traffic() as traffic:
            result = engine.train_batch([step[rank]])
        engine.loss_fn = plait.causal_lm_loss

        after = full_weights(engine.model)
        changed = bool(names_of_differences(before, after))
        norm = float(result.grad_norm)
        loss = float(result.loss)
        history.append(StepRecord(result.loss_scale, result.skipped, changed, norm, loss))
        before = after
    dtypes = {name: traffic.dtypes(name) for name in ("all_gather", "reduce_scatter")}
    return history, dtypes, before


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_skips_on_every_rank_and_halves_the_scale(pool, stage):
    """All ranks skip for one rank's overflow. The scale rises again after the window."""
    config = settings(2, stage, 1, 1, **FP16)
    (history, _, weights), (other_history, _, other_weights) = pool.run(2, train, config, 2, 8)

    assert history[0][:3] == other_history[0][:3]
    scales, skipped, changed, norms, _ = zip(*history, strict=True)
    assert skipped == (False, False, True, False, False, False, False, False)
    assert changed == (True, True, False, True, True, True, True, True)
    assert scales == (256, 256, 256, 128, 128, 128, 256, 256)
    assert not math.isfinite(norms[2])
    assert_equal(weights, other_weights)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_precision_is_close_to_full(pool, stage, name):
    """Loss scales and divisors cancel, so norm and loss differ by the format's precision only."""
    section: dict[str, Any] = FP16 if name == "fp16" else {"bf16": {"enabled": True}}
    half = pool.run(2, train, settings(2, stage, 1, 1, **section), None, 4)[0][0]
    full = pool.run(2, train, settings(2, stage, 1, 1), None, 4)[0][0]
    for actual, expected in zip(half, full, strict=True):
        assert actual.loss == pytest.approx(expected.loss, rel=1e-2)
        assert actual.norm == pytest.approx(expected.norm, rel=3e-2)


def test_dtypes_on_the_wire(pool):
    """Gathers use the compute dtype, and so do reductions unless the file sets another dtype.

    This is DeepSpeed's rule, with and without Plait's sections in the file (A24).
    """
    file = settings(2, 2, 1, 1, bf16={"enabled": True})
    deepspeed_file = {k: v for k, v in file.items() if k not in ("run", "parallel")}
    for config, reduced in (
        (file, torch.bfloat16),
        (deepspeed_file, torch.bfloat16),
        ({**file, "communication_data_type": "fp32"}, torch.float32),
        ({**file, "data_types": {"grad_accum_dtype": "fp32"}}, torch.float32),
    ):
        dtypes = pool.run(2, train, config, None, 2)[0][1]
        assert dtypes == {"all_gather": {torch.bfloat16}, "reduce_scatter": {reduced}}


def test_the_reference_weights_are_float64():
    """Guards the parity tests against a silent change of dtype."""
    assert {p.dtype for p in materialised("plain", tied=True).parameters()} == {torch.float64}
