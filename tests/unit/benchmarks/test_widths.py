"""Widths of constants are scaled so that intervals cover nine of ten measured runs."""

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


def make_residuals(size, *, constants=0.1, kernels=0.0, noise=0.0):
    """Return residuals whose intervals have the same parts in all rows."""
    parts = np.ones((len(size), 3)) * (constants, kernels, noise)
    return Residuals(np.abs(size), *parts.T)


def draw(width, count=4000):
    """Return normally distributed residuals."""
    return np.random.default_rng(0).normal(0, width, count)


def test_the_scale_covers_nine_in_ten():
    scales = scales_of([make_residuals(draw(0.2))])
    assert scales == Scales(constants=pytest.approx(2.0, rel=0.05))


def test_only_widths_of_kernels_become_narrower():
    scales = scales_of([make_residuals(draw(0.1), constants=0.06, kernels=0.16)])
    assert scales == Scales(kernels=pytest.approx(0.5, rel=0.1))
    assert scales_of([make_residuals(draw(0.1), noise=0.2)]).constants == 1.0


def test_a_family_of_many_rows_does_not_decide_alone():
    many = draw(0.1)
    few = draw(0.3, 40)
    by_rows = scales_of([make_residuals(np.concatenate([many, few]))])
    by_families = scales_of([make_residuals(many), make_residuals(few)])
    assert by_families.constants > 1.1 * by_rows.constants


def test_residuals_divide_an_interval_into_three_parts():
    rows = [row for row in rows_of("runs") if row["id"].startswith("SIMUMAX") and not row["moe"]]
    priors = fitted_priors()
    base = residuals(rows, priors)
    assert len(base.size) == 31 and (base.constants > 0).all() and not base.kernels.any()
    assert (base.noise >= priors.time_spread - 1e-9).all()

    wider = residuals(rows, scaled(priors, Scales(constants=2.0)))
    assert wider.constants == pytest.approx(2 * base.constants, rel=0.01)
    assert wider.noise == pytest.approx(base.noise, rel=1e-3)
    quiet = residuals(rows, replace(priors, time_spread=0.0))
    assert quiet.constants == pytest.approx(base.constants, rel=0.01)
    assert (quiet.noise < base.noise).all()

    # Kernels of a framework that was not measured have the width of the datasheet.
    stack = datasheet_priors().constants["stack.simumax"]
    unmeasured_priors = replace(priors, constants={**priors.constants, "stack.simumax": stack})
    unmeasured = residuals(rows, unmeasured_priors)
    assert (unmeasured.kernels > stack.width / 3).all()
    halved = residuals(rows, scaled(unmeasured_priors, Scales(kernels=0.5)))
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
    unnamed = framework(text)
    assert unnamed.name == "other" and "aleph" not in text.lower()
    assert (unnamed.separate_norms, unnamed.separate_rotary) == (0, 1)
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
        "model_name": "x",
        "n_layers": "2",
        "hidden": "512",
        "n_heads": "8",
        "gated_mlp": "n",
        "gpu": "A100-80GB-SXM",
        "gpus_total": "8",
        "tp": "1",
        "pp": "1",
        "global_batch": "8",
        "framework": "DeepSpeed",
        "zero_or_fsdp": "ZeRO-3",
    }
    for changes, name in (
        ({}, "deepspeed"),
        ({"seq_len": "8192"}, "deepspeed-modern"),
        ({"gated_mlp": "y"}, "deepspeed-modern"),
    ):
        assert read_runs([{"seq_len": "2048", **row, **changes}]).variants[0].framework.name == name
