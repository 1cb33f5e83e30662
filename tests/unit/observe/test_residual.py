"""A run is compared with its plan in one line, and a run that differs from it is not."""

from __future__ import annotations

from typing import Any

import pytest

from plait.config.resolving.resolve import load
from plait.events import RunEnded
from plait.observe.residual import WARMUP_STEPS, plan_residual
from tests.unit.observe.planned import checked, planned, step


def listener_of(file, plan, lines, *overrides, gpu="cpu", per_node=2, **changes):
    """Return the listener of a run with overrides."""
    run = checked(file, plan, *overrides, **changes)
    config = load(file, list(overrides))
    return plan_residual(file, run, config, gpu=gpu, per_node=per_node, say=lines.append)


@pytest.mark.parametrize(
    "fixed", [{"tp": 2}, {"pp": 2, "recompute": 2}, {"stage": 3, "micro_batch": 2}, {"stage": 0}]
)
def test_a_planned_run_is_compared(tmp_path, fixed):
    file, plan = planned(tmp_path, fixed)
    lines: list[str] = []
    listener = listener_of(file, plan, lines)
    assert listener is not None
    # Steps of the warm-up and skipped steps do not count.
    seconds = [9.0] * WARMUP_STEPS + [0.5] * 4 + [0.7, 0.7, 7.0, 0.6]
    for number, duration in enumerate(seconds, start=1):
        listener(step(number, duration, skipped=duration == 7.0))
    assert not lines
    listener(step(20, 0.6))
    listener(step(21, 99.0))
    (line,) = lines
    predicted = plan.best[0].seconds
    ratio = 0.55 / predicted
    assert f"step predicted {predicted:.4g} s, measured 0.55 s, x {ratio:.2f}" in line
    assert "memory predicted" in line and "measured 300.0 MiB" in line
    assert line.endswith("; 8 steps")


def test_a_short_run_is_compared_at_its_end(tmp_path):
    file, plan = planned(tmp_path, {})
    for steps, expected_lines in ((WARMUP_STEPS + 2, 0), (WARMUP_STEPS + 3, 1)):
        lines: list[str] = []
        listener = listener_of(file, plan, lines)
        assert listener is not None
        for number in range(steps):
            listener(step(number, 0.5))
        listener(RunEnded(steps, "finished", 1.0, "x"))
        assert len(lines) == expected_lines


SMALL_MICRO_BATCH = "train_micro_batch_size_per_gpu=1 gradient_accumulation_steps=4"
OTHER_RUNS: list[tuple[str, dict[str, Any], str]] = [
    ("zero_optimization.stage=2", {}, "stage: 3 in the plan, 2 in the run"),
    ("parallel.recompute.mode=full", {}, "recompute: none in the plan, full in the run"),
    ("", {"parameters": 7}, "in the plan, 7 in the run"),
    ("", {"length": 32}, "sequence: 64 in the plan, 32 in the run"),
    ("", {"gpu": "h100"}, "device: cpu in the plan, h100 in the run"),
    ("", {"per_node": 1}, "processes per machine: 2 in the plan, 1 in the run"),
    ("bf16.enabled=true", {}, "precision: fp32 in the plan, bf16 in the run"),
    ("parallel.loss_chunk_tokens=16", {}, "loss_chunk: 0 in the plan, 16 in the run"),
    ("parallel.tensor_overlap=2", {}, "plans do not model parallel.tensor_overlap = 2"),
    # The layouts of these runs are those of the plan.
    ("communication_data_type=bf16", {}, "reduction: fp32 in the plan, bf16 in the run"),
    ("optimizer.states=int8", {}, "optimizer.states: None in the plan, int8 in the run"),
    ("optimizer.type=SGD optimizer.params.lr=1", {}, "do not model optimizer.type = SGD"),
    ("parallel.compress_gradients=int8", {}, "do not model parallel.compress_gradients = int8"),
    ("model.dtype=bfloat16", {}, "the model: "),
    (SMALL_MICRO_BATCH, {}, "micro_batch: 4 in the plan, 1 in the run"),
]
"""Overrides, other changes, and the reason in the line."""


def test_another_run_is_not_compared(tmp_path):
    file, plan = planned(tmp_path, {"stage": 3, "micro_batch": 4})
    failures = []
    for overrides, changes, reason in OTHER_RUNS:
        lines: list[str] = []
        listener = listener_of(file, plan, lines, *overrides.split(), **changes)
        if listener is not None or len(lines) != 1 or reason not in lines[0]:
            failures.append((overrides, changes, lines))
    assert not failures


def test_a_damaged_plan_is_reported(tmp_path):
    file, plan = planned(tmp_path, {})
    plan_file = file.with_suffix(".plan.json")
    for text in ("{", '{"cluster": {}}', "[]"):
        plan_file.write_text(text)
        lines: list[str] = []
        assert listener_of(file, plan, lines) is None
        assert len(lines) == 1 and "cannot be read" in lines[0]

    plan_file.unlink()
    lines = []
    assert listener_of(file, plan, lines) is None and not lines
