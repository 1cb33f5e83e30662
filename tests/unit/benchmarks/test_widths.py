from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planner_accuracy.frameworks import (
    datasheet_priors,
    fitted_priors,
    framework,
    without_name,
)
from benchmarks.planner_accuracy.learn import rows_of
from benchmarks.planner_accuracy.runs import read_runs
from benchmarks.planner_accuracy.widths import Residuals, Scales, residuals, scaled, scales_of


def _rows(size, *, constants=0.1, kernels=0.0, noise=0.0):
    parts = (np.full(len(size), value) for value in (constants, kernels, noise))
    return Residuals(np.abs(size), *parts)


def test_the_scale_covers_nine_in_ten():
    drawn = np.random.default_rng(0).normal(0, 0.2, 4000)
    assert scales_of([_rows(drawn)]) == Scales(constants=pytest.approx(2.0, rel=0.05))


def test_only_widths_of_kernels_become_narrower():
    drawn = np.random.default_rng(0).normal(0, 0.1, 4000)
    scales = scales_of([_rows(drawn, constants=0.06, kernels=0.16)])
    assert scales == Scales(kernels=pytest.approx(0.5, rel=0.1))
    narrow = scales_of([_rows(drawn, noise=0.2)])
    assert narrow.constants == 1.0


def test_a_family_of_many_rows_does_not_decide_alone():
    rng = np.random.default_rng(0)
    many, few = (rng.normal(0, width, n) for width, n in ((0.1, 4000), (0.3, 40)))
    by_rows = scales_of([_rows(np.concatenate([many, few]))])
    assert scales_of([_rows(many), _rows(few)]).constants > 1.1 * by_rows.constants


def test_residuals_divide_an_interval_into_three_parts():
    rows = [row for row in rows_of("runs") if row["id"].startswith("SIMUMAX") and not row["moe"]]
    priors = fitted_priors()
    found = residuals(rows, priors)
    assert len(found.size) == 31 and (found.constants > 0).all() and not found.kernels.any()
    assert (found.noise >= priors.time_spread - 1e-9).all()
    wider = residuals(rows, scaled(priors, Scales(constants=2.0)))
    assert wider.constants == pytest.approx(2 * found.constants, rel=0.01)
    assert wider.noise == pytest.approx(found.noise, rel=1e-3)
    quiet = residuals(rows, replace(priors, time_spread=0.0))
    assert quiet.constants == pytest.approx(found.constants, rel=0.01)
    assert (quiet.noise < found.noise).all()
    stack = datasheet_priors().constants["stack.simumax"]
    believed = replace(priors, constants={**priors.constants, "stack.simumax": stack})
    unmeasured = residuals(rows, believed)
    assert (unmeasured.kernels > stack.width / 3).all()
    halved = residuals(rows, scaled(believed, Scales(kernels=0.5)))
    expected = np.hypot(unmeasured.constants, unmeasured.kernels / 2)
    assert halved.constants == pytest.approx(expected, rel=0.01)


def test_widths_of_plait_and_unnamed_frameworks_stay():
    shipped = datasheet_priors().constants
    narrowed = scaled(datasheet_priors(), Scales(kernels=0.5)).constants
    for name in ("plait", "other", "other-modern", "torch-fsdp", "deepspeed"):
        assert narrowed[f"stack.{name}"].width == shipped[f"stack.{name}"].width
    assert narrowed["stack.nanotron"].width == shipped["stack.nanotron"].width / 2


def test_a_framework_without_its_name_keeps_its_kernels():
    text = without_name("AA-Scaling (Aleph Alpha), attention kernel: flash_attention2 + RMS kernel")
    found = framework(text)
    assert found.name == "other" and "aleph" not in text.lower()
    assert (found.separate_norms, found.separate_rotary) == (0, 1)
    assert framework(without_name("x, attention kernel: flash_attentionv1.0.8")).flash == 0.65
    assert framework(without_name("InternEvo")) == framework("unknown")
    assert framework("unknown", newer=True).name == "other-modern"


def test_a_recent_model_has_the_kernels_of_its_time():
    assert framework("DeepSpeed", recent=True).name == "deepspeed-modern"
    assert framework("Megatron-LM", recent=True).name == "megatron-modern"
    unfused = framework("DeepSpeed, unfused attention", recent=True).attention
    assert unfused == framework("DeepSpeed").attention != framework("x").attention
    # Kernels of an unknown framework are unknown.
    assert framework("unknown", recent=True).name == "other"
    row = {
        "model_name": "x", "n_layers": "2", "hidden": "512", "n_heads": "8", "gated_mlp": "n", "gpu": "A100-80GB-SXM",
        "gpus_total": "8", "tp": "1", "pp": "1", "global_batch": "8", "framework": "DeepSpeed", "zero_or_fsdp": "ZeRO-3",
    }  # fmt: skip
    for changes, name in (
        ({}, "deepspeed"),
        ({"seq_len": "8192"}, "deepspeed-modern"),
        ({"gated_mlp": "y"}, "deepspeed-modern"),
    ):
        assert read_runs([{"seq_len": "2048", **row, **changes}]).variants[0].framework.name == name
