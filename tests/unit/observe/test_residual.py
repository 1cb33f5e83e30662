"""A run compared with its plan: one line, and nothing for a run that differs from it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.config.resolving.resolve import load
from plait.events import RunEnded
from plait.observe.residual import WARMUP_STEPS, plan_residual
from tests.unit.observe.planned import checked, planned, step


def listened(file, found, said, *overrides, gpu="cpu", per_node=2, **changes):
    """The listener of a run with some overrides."""
    run = checked(file, found, *overrides, **changes)
    config = load(file, list(overrides))
    return plan_residual(file, run, config, gpu=gpu, per_node=per_node, say=said.append)


@pytest.mark.parametrize(
    "fixed", [{"tp": 2}, {"pp": 2, "recompute": 2}, {"stage": 3, "micro_batch": 2}, {"stage": 0}]
)
def test_a_planned_run_is_compared(tmp_path, fixed):
    file, found = planned(tmp_path, fixed)
    said: list[str] = []
    listener = listened(file, found, said)
    assert listener is not None and not said
    times = [9.0] * WARMUP_STEPS + [0.5] * 4 + [0.7, 0.7, 7.0, 0.6]
    for number, seconds in enumerate(times, start=1):
        listener(step(number, seconds, skipped=seconds == 7.0))
    assert not said
    listener(step(20, 0.6))
    listener(step(21, 99.0))
    best = found.best[0]
    assert len(said) == 1
    assert (
        f"step predicted {best.seconds:.4g} s, measured 0.55 s, x {0.55 / best.seconds:.2f}"
        in said[0]
    )
    assert "memory predicted" in said[0] and "measured 300.0 MiB" in said[0]
    assert said[0].endswith("; 8 steps")


def test_a_short_run_is_compared_at_its_end(tmp_path):
    file, found = planned(tmp_path, {})
    for steps, lines in ((WARMUP_STEPS + 2, 0), (WARMUP_STEPS + 3, 1)):
        said: list[str] = []
        listener = listened(file, found, said)
        assert listener is not None
        for number in range(steps):
            listener(step(number, 0.5))
        listener(RunEnded(steps, "finished", 1.0, "x"))
        assert len(said) == lines


OTHER_RUNS: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (("train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=4"), {}, "micro_batch: 4 in the plan, 1 in the run"),
    (("zero_optimization.stage=2",), {}, "stage: 3 in the plan, 2 in the run"),
    (("parallel.recompute.mode=full",), {}, "recompute: none in the plan, full in the run"),
    ((), {"parameters": 7}, "in the plan, 7 in the run"),
    ((), {"length": 32}, "sequence: 64 in the plan, 32 in the run"),
    (("bf16.enabled=true",), {}, "precision: fp32 in the plan, bf16 in the run"),
    (("parallel.loss_chunk_tokens=16",), {}, "loss_chunk: 0 in the plan, 16 in the run"),
    (("parallel.tensor_overlap=2",), {}, "plans do not model parallel.tensor_overlap = 2"),
    # D10: what a comparison of layouts alone let through.
    (("communication_data_type=bf16",), {}, "reduction: fp32 in the plan, bf16 in the run"),
    (("optimizer.states=int8",), {}, "optimizer.states: None in the plan, int8 in the run"),
    (("optimizer.type=SGD", "optimizer.params.lr=1"), {}, "plans do not model optimizer.type = SGD"),
    (("parallel.compress_gradients=int8",), {}, "plans do not model parallel.compress_gradients = int8"),
    (("model.dtype=bfloat16",), {}, "the model: "),
]  # fmt: skip
"""Overrides, changes of what was checked, and what the line says."""


def test_another_run_is_not_compared(tmp_path):
    file, found = planned(tmp_path, {"stage": 3, "micro_batch": 4})
    wrong = []
    for overrides, changes, words in OTHER_RUNS:
        said: list[str] = []
        listener = listened(file, found, said, *overrides, **changes)
        if listener is not None or len(said) != 1 or words not in said[0]:
            wrong.append((overrides, changes, said))
    assert not wrong


def test_another_device_and_a_broken_plan_are_told(tmp_path):
    file, found = planned(tmp_path, {})
    said: list[str] = []
    assert listened(file, found, said, gpu="h100") is None
    assert "device: cpu in the plan, h100 in the run" in said[-1]
    assert listened(file, found, said, per_node=1) is None
    assert "processes per machine: 2 in the plan, 1 in the run" in said[-1]
    run = checked(file, found)
    config = load(file)
    for text in ("{", json.dumps({"cluster": {}}), "[]"):
        file.with_suffix(".plan.json").write_text(text)
        assert plan_residual(file, run, config, gpu="cpu", per_node=2, say=said.append) is None
        assert "cannot be read" in said[-1]
    file.with_suffix(".plan.json").unlink()
    count = len(said)
    assert plan_residual(file, run, config, gpu="cpu", per_node=2, say=said.append) is None
    assert len(said) == count
