"""`plait train` of a file that `plait plan --out` wrote hears its steps for the history, and of any other file does not."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from plait.cli.train import _residuals
from plait.config.resolving.resolve import load
from plait.observe.residual import STEPS, WARM, Residual
from plait.planner.history import read
from tests.unit.observe.planned import checked, planned, step


def test_a_planned_file_has_a_listener_that_keeps_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    file, found = planned(tmp_path, {"stage": 2})
    history = tmp_path / "history.jsonl"
    config = load(file, [f"run.history={history}"])
    stream = io.StringIO()
    (listener,) = _residuals(file, checked(file, found), config, Console(file=stream))
    assert isinstance(listener, Residual)
    for number in range(WARM + STEPS):
        listener(step(number, 0.5))
    assert "step predicted" in stream.getvalue()
    rows, _ = read(history)
    assert [row.seconds for row in rows] == [0.5] and rows[0].machine
    file.with_suffix(".plan.json").unlink()
    assert _residuals(file, checked(file, found), config, Console(file=stream)) == ()
