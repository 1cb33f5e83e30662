"""`plait train` of a file that leaves the layout open: planned once, kept while the file asks for the same, refused where it is late."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.cli.planning.query import planned_file, refuse_auto
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError, InputError

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    tree: dict[str, Any] = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": "auto"},
        "parallel": {"tp": "auto", "recompute": {"mode": "none"}},
        "model": {"config": MODEL},
        "data": {"source": "python-stdlib", "sequence_length": 64},
        "run": {"folder": str(tmp_path / "run"), "steps": 2, "processes": 2},
    }
    path = tmp_path / "open.json"
    path.write_text(json.dumps(tree))
    return path


def planned(file, *overrides, processes=None, fresh=False):
    said: list[str] = []
    return planned_file(
        file, list(overrides), processes=processes, fresh=fresh, say=said.append
    ), said


def test_auto_is_planned_and_runs(file):
    path, said = planned(file)
    assert path is not None and "parallel.tp, zero_optimization.stage" in said[-1]
    resolved = resolve(load(path), world_size=2)
    assert (
        resolved.layout.world_size == 2
        and resolved.recompute.mode == "none"
        and resolved.run.steps == 2
    )
    assert json.loads(path.with_suffix(".plan.json").read_text())["step"]["seconds"] > 0


def test_a_plan_is_kept_while_the_file_asks_for_the_same(file):
    path, _ = planned(file)
    assert path is not None
    path.write_text(path.read_text() + "\n")  # so that a second plan would show
    before = path.read_text()
    assert "planned before" in planned(file)[1][0] and path.read_text() == before
    assert "predicted" in planned(file, "run.steps=3")[1][-1] and path.read_text() != before
    assert "predicted" in planned(file, "run.steps=3", fresh=True)[1][-1]
    path, said = planned(file, "run.steps=3", processes=4)
    assert path is not None and "predicted" in said[-1]
    assert resolve(load(path), world_size=4).layout.world_size == 4


def test_nothing_open_is_left_alone(file):
    assert planned(file, "parallel.tp=1", "zero_optimization.stage=1") == (None, [])
    refuse_auto(file, ["parallel.tp=1", "zero_optimization.stage=1"])


def test_too_late_or_too_little_is_refused(file):
    words = (
        r"parallel\.tp, zero_optimization\.stage = .auto. is planned before processes are started"
    )
    with pytest.raises(InputError, match=words):
        refuse_auto(file, [])
    with pytest.raises(ConfigError, match="train_batch_size"):
        planned(file, "train_batch_size=null")
    with pytest.raises(ConfigError, match=r"parallel\.tp = 'auto': is answered by a plan"):
        load(file)
