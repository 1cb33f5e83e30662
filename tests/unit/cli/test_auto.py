"""A file that leaves its layout open is planned once, before `plait train` starts processes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.cli.planning.query import planned_file, refuse_auto
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError, InputError
from tests.unit.planner.jobs import llama


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    tree: dict[str, Any] = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": "auto"},
        "parallel": {"tp": "auto", "recompute": {"mode": "none"}},
        "model": {"config": llama()},
        "data": {"source": "python-stdlib", "sequence_length": 64},
        "run": {"folder": str(tmp_path / "run"), "steps": 2, "processes": 2},
    }
    path = tmp_path / "open.json"
    path.write_text(json.dumps(tree))
    return path


def plan(file, *overrides, processes=None, fresh=False):
    """Return the file with the plan, and the messages about it."""
    messages: list[str] = []
    options = {"processes": processes, "fresh": fresh, "say": messages.append}
    return planned_file(file, list(overrides), **options), messages


def test_auto_is_planned(file):
    path, messages = plan(file)
    assert "parallel.tp, zero_optimization.stage" in messages[-1]
    resolved = resolve(load(path), world_size=2)
    assert (resolved.layout.world_size, resolved.run.steps) == (2, 2)
    assert resolved.recompute.mode == "none"
    assert json.loads(path.with_suffix(".plan.json").read_text())["step"]["seconds"] > 0


def test_a_plan_is_reused_until_the_file_changes(file):
    path, _ = plan(file)
    # A second plan would remove this line.
    path.write_text(path.read_text() + "\n")
    before = path.read_text()
    assert "planned before" in plan(file)[1][0] and path.read_text() == before

    assert "predicted" in plan(file, "run.steps=3")[1][-1] and path.read_text() != before
    assert "predicted" in plan(file, "run.steps=3", fresh=True)[1][-1]
    path, messages = plan(file, "run.steps=3", processes=4)
    assert "predicted" in messages[-1]
    assert resolve(load(path), world_size=4).layout.world_size == 4


def test_a_file_without_auto_is_not_planned(file):
    assert plan(file, "parallel.tp=1", "zero_optimization.stage=1") == (None, [])
    refuse_auto(file, ["parallel.tp=1", "zero_optimization.stage=1"])


def test_auto_is_refused_too_late_and_without_a_batch_size(file):
    message = r"parallel\.tp, zero_optimization\.stage = .auto. is planned before processes are"
    with pytest.raises(InputError, match=message):
        refuse_auto(file, [])
    with pytest.raises(ConfigError, match="train_batch_size"):
        plan(file, "train_batch_size=null")
    with pytest.raises(ConfigError, match=r"parallel\.tp = 'auto': is answered by a plan"):
        load(file)
