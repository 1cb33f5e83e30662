"""Verdicts of the checks: a planted difference fails the row."""

import math
import sys
from collections import Counter
from types import ModuleType

import pytest
import torch

from plait.planner.calibrate import CalibrationOrigin, load_calibration, save_calibration
from plait.planner.hardware import device as device_of
from plait.sizes import GIB
from plait.validation import (
    attention,
    ceilings,
    device_memory,
    kernels,
    parity,
    peers,
    profile,
    throughput,
)
from plait.validation.context import WIDE
from plait.validation.rows import NotRun, summary_of
from plait.verify.parity import Trace


def test_predicted_memory_may_be_2_percent_off():
    for predicted in (1000, 1019, 981):
        assert device_memory.difference(predicted, 1000) == ""
    assert "+5.0%, allowed 2%" in device_memory.difference(1050, 1000)
    assert device_memory.difference(950, 1000)
    assert device_memory.difference(1, 0)


def test_a_layer_takes_about_a_twentieth_of_the_memory():
    shape = device_memory.shape_of(24 * GIB)
    # A layer has 12.25 x hidden^2 parameters of 16 bytes.
    assert 0.03 < 16 * 12.25 * shape.hidden**2 / (24 * GIB) < 0.06
    assert shape.hidden % shape.heads == 0


def test_half_of_the_datasheet_rate_is_required():
    assert ceilings.too_slow("to_host", 25e9, 50e9) == ""
    assert "12.0 G per second" in ceilings.too_slow("to_host", 12e9, 25e9)
    # An unknown rate is not compared.
    assert ceilings.too_slow("product", 1.0, math.nan) == ""


def test_devices_without_bfloat16_do_not_run_its_rows(context, monkeypatch):
    """The catalogue has no rate of bfloat16 for a V100. Ranks must not fail with a KeyError."""
    for module, check, settings in (
        (throughput, throughput.compare, {"contenders": ["plait"]}),
        (kernels, kernels.calibrate, {}),
    ):
        monkeypatch.setattr(module, "datasheet", lambda _: device_of("v100-32gb"))
        with pytest.raises(NotRun, match="computes in bfloat16, which .*V100.* does not support"):
            check(context, settings)


def test_places_with_the_most_waits_are_reported_first():
    places = Counter({"plait/sharded/step.py:97": 5})
    assert profile.judge(places, 5, 1).outcome == "passed"
    places["plait/train/loop.py:7"] = 10
    result = profile.judge(places, 5, 1)
    assert result.outcome == "failed"
    assert "3 waits per step, 1 expected; in 5 steps: plait/train/loop.py:7 (10)" in result.reason
    assert summary_of("waits/fp16", result.numbers) == "3 per step, 1 expected"


def test_a_compressed_loss_may_be_2_percent_off():
    def trace(*losses):
        return Trace(losses, tuple(1.0 for _ in losses), (), {})

    assert parity.judge_compressed(trace(2.0, 1.01), trace(2.0, 1.0)).outcome == "passed"
    assert parity.judge_compressed(trace(2.0, 1.03), trace(2.0, 1.0)).outcome == "failed"
    assert parity.judge_compressed(trace(float("nan")), trace(2.0)).outcome == "failed"


def test_a_planned_step_may_take_1_5_times_as_long():
    for measured, prediction in ((1.4, 1.0), (1.0, 1.4)):
        assert kernels.judge(measured, prediction).outcome == "passed"
    for measured, prediction in ((1.6, 1.0), (1.0, 1.6), (1.0, 0.0)):
        assert kernels.judge(measured, prediction).outcome == "failed"


def test_a_reference_is_computed_once(context, monkeypatch):
    """Two layouts of one rank share the references, which do not depend on the layout."""
    passes = []
    references = parity.references

    def recorded(plan, name, trace):
        passes.append(name)
        return references(plan, name, trace)

    # The saved time shows nowhere else.
    monkeypatch.setattr(parity, "references", recorded)
    bf16 = {"bf16": {"enabled": True}}
    for config in (bf16, {**bf16, "parallel": {"recompute": {"mode": "full"}}}):
        result = parity.layout(context, {"config": config})
        assert result.outcome == "passed", result.reason
        assert result.numbers["float64"]["largest_error"] <= 1e-10
    assert passes == ["float64", "configured"]


H100_KERNELS = {
    "products": {"8192 x 8192 x 8192": 700e12, "8192 x 4096 x 4096": 600e12},
    "attention": {str(length): {"flops_per_second": 400e12} for length in kernels.LENGTHS},
    "addition_bytes_per_second": 2.9e12,
    "small_kernel_seconds": 4e-6,
}


def test_measured_kernels_replace_constants_of_the_planner(tmp_path):
    calibration = kernels.calibration_of(H100_KERNELS, device_of("h100"))
    constants = kernels.constants_of(calibration)
    shares = {"gemm.hopper": 700 / 989, "attention.hopper": 400 / 989, "memory": 2.9 / 3.35}
    assert constants == pytest.approx(shares | {"ramp": 4e-6})
    save_calibration(tmp_path / "h100.json", calibration, CalibrationOrigin("h100"))
    loaded, origin = load_calibration(tmp_path / "h100.json")
    assert origin.gpu == "h100"
    assert kernels.constants_of(loaded) == pytest.approx(constants)


def test_flops_of_llama_3_8b():
    """The model card has 8.03 B parameters for 32 layers of this width and the ends."""
    llama = WIDE.with_layers(32)
    assert llama.parameters == pytest.approx(8.03e9, rel=1e-3)
    products = 32 * llama.layer_parameters + llama.vocabulary * llama.hidden
    attention_flops = 6 * 32 * 4096 * 8192 * 8192
    assert llama.flops == pytest.approx(6 * products * 8192 + attention_flops)


def test_timed_kernels_run_on_a_cpu(context):
    """A CPU writes no calibration of a GPU."""
    result = kernels.calibrate(context, {})
    assert result.outcome == "passed"
    assert set(result.numbers["attention"]) == {"16", "32"}
    assert "file" not in result.numbers


def test_attention_kernels(context):
    """The row compares the kernels of a CPU too, and names one that is wrong."""
    result = attention.kernels(context, {})
    assert result.outcome == "passed", result.reason
    assert result.numbers["float32"]["kernel"] == "cpu"
    error = result.numbers["bfloat16, documents"]["largest_error"]
    assert 0 < error < attention.ALLOWED[torch.bfloat16]

    errors = {"output": 1.0, "gradient of key": float("nan")}
    problems = attention.problems_of(attention.Case(torch.float16), "flash", errors)
    assert problems == [
        "float16 (flash): error of the output 1.0e+00, allowed 4e-03",
        "float16 (flash): error of the gradient of key nan, allowed 4e-03",
    ]


def test_liger_changes_no_later_models(monkeypatch):
    """Liger replaces classes in Transformers' module, which are restored after its contender."""
    from transformers.models.llama import modeling_llama

    def apply(*, fused_linear_cross_entropy, model):
        modeling_llama.LlamaRMSNorm = object

    package = ModuleType("liger_kernel.transformers")
    package.apply_liger_kernel_to_llama = apply
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    norm = modeling_llama.LlamaRMSNorm
    restore = peers.install_liger_kernels(torch.nn.Identity(), fused_linear_cross_entropy=True)
    assert modeling_llama.LlamaRMSNorm is object
    restore()
    assert modeling_llama.LlamaRMSNorm is norm
