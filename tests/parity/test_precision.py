"""Mixed precision: fp16's loss scale and skipped steps agree on every rank and stage; bf16 stays close to float32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import plait
from plait.verify.parity import full_tensor_on_cpu
from tests.measured.traffic import count_traffic
from tests.parity import cases
from tests.parity.data_parallel import materialised, settings

FP16 = {
    "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
}


def run(rank, world, config, overflow_at, steps=6):
    """Some steps; in step `overflow_at` the last rank alone meets an infinite loss. Runs in a worker."""
    engine = cases.engine(cases.build("plain", tied=True, dtype=torch.float32), config)
    history = []
    before = {name: full_tensor_on_cpu(p) for name, p in engine.model.named_parameters()}
    for index, step in enumerate(cases.ragged_steps(world, steps=steps, keys=())):
        batch = step[rank]
        if index == overflow_at and rank == world - 1:
            engine.loss_fn = Exploding()
        with count_traffic() as traffic:
            result = engine.train_batch([batch])
        engine.loss_fn = plait.causal_lm_loss
        after = {name: full_tensor_on_cpu(p) for name, p in engine.model.named_parameters()}
        changed = any(not torch.equal(before[name], after[name]) for name in after)
        history.append(
            (
                result.loss_scale,
                result.skipped,
                changed,
                float(result.grad_norm),
                float(result.loss),
            )
        )
        before = after
    return {
        "history": history,
        "dtypes": {k: traffic.dtypes(k) for k in ("all_gather", "reduce_scatter", "all_reduce")},
        "weights": before,
    }


class Exploding:
    """The loss of a language model, with an infinite gradient."""

    def __call__(self, output, batch):
        total, weight = plait.causal_lm_loss(output, batch)
        return total * 1e38 * 1e38, weight

    def weight(self, batch):
        return plait.causal_lm_loss.weight(batch)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_skips_on_every_rank_and_halves_the_scale(pool, stage):
    """One rank's overflow is every rank's; nothing but the scale changes; the scale rises again after the window."""
    results = pool.run(2, run, settings(2, stage, 1, 1, **FP16), 2)
    assert results[0]["history"][0][:3] == results[1]["history"][0][:3]
    history = results[0]["history"]
    assert [skipped for _, skipped, *_ in history] == [False, False, True, False, False, False]
    assert [changed for _, _, changed, *_ in history] == [True, True, False, True, True, True]
    assert [scale for scale, *_ in history] == [256, 256, 256, 128, 128, 128]
    assert not math.isfinite(history[2][3])
    for name, tensor in results[0]["weights"].items():
        assert torch.equal(tensor, results[1]["weights"][name])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_precision_is_close_to_full(pool, stage, name):
    """The scale and every division cancel: the norm and losses are those of float32, to the precision of the format."""
    section: dict[str, Any] = FP16 if name == "fp16" else {"bf16": {"enabled": True}}
    half = pool.run(2, run, settings(2, stage, 1, 1, **section), None, 4)[0]
    full = pool.run(2, run, settings(2, stage, 1, 1), None, 4)[0]
    for (*_, norm, loss), (*_, wanted_norm, wanted_loss) in zip(
        half["history"], full["history"], strict=True
    ):
        assert loss == pytest.approx(wanted_loss, rel=1e-2)
        assert norm == pytest.approx(wanted_norm, rel=3e-2)


def test_dtypes_on_the_wire(pool):
    """Gathers in the compute dtype; reductions too, as in DeepSpeed, whether or not Plait's sections are there (A24), or as told."""
    file = settings(2, 2, 1, 1, bf16={"enabled": True})
    without = {k: v for k, v in file.items() if k not in ("run", "parallel")}
    told, added_up = (
        {**file, "communication_data_type": "fp32"},
        {**file, "data_types": {"grad_accum_dtype": "fp32"}},
    )
    for config, reduced in (
        (file, torch.bfloat16),
        (without, torch.bfloat16),
        (told, torch.float32),
        (added_up, torch.float32),
    ):
        dtypes = pool.run(2, run, config, None, 2)[0]["dtypes"]
        assert dtypes["all_gather"] == {torch.bfloat16}
        assert dtypes["reduce_scatter"] == {reduced}


def test_the_reference_weights_are_float64():
    """Guards the parity tests against a silent change of dtype."""
    assert {p.dtype for p in materialised("plain", tied=True).parameters()} == {torch.float64}
