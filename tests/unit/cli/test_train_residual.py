"""`plait train` compares its steps with the plan, if `plait plan` wrote the file."""

import io

from rich.console import Console

# The command starts processes after this step.
from plait.cli.train import _residuals
from plait.config.resolving.resolve import load
from plait.observe.residual import MEASURED_STEPS, WARMUP_STEPS, PlanResidual
from tests.unit.observe.planned import checked, planned, step


def test_a_planned_file_has_a_listener(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    file, result = planned(tmp_path, {"stage": 2})
    config = load(file)
    stream = io.StringIO()
    (listener,) = _residuals(file, checked(file, result), config, Console(file=stream))
    assert isinstance(listener, PlanResidual)
    for number in range(WARMUP_STEPS + MEASURED_STEPS):
        listener(step(number, 0.5))
    assert "step predicted" in stream.getvalue()
    file.with_suffix(".plan.json").unlink()
    assert _residuals(file, checked(file, result), config, Console(file=stream)) == ()
