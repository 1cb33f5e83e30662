"""metrics.jsonl: every step once, in order, valid JSON, through crashes and resumes."""

import json
import math

import pytest

from plait.errors import InputError
from plait.events import (
    CheckpointSaved,
    CommunicationSelected,
    RunEnded,
    RunStarted,
    StepDone,
    Validated,
)
from plait.observe.metrics import MetricsFile, read_metrics


def _start(first):
    return RunStarted(first, 10, 2, 100, "dp_shard=2", "runs/x")


def _step(step, loss=1.0):
    return StepDone(step, loss, 0.1, 1e-3, 1.0, False, 10.0, 12, 0.5, 1024)


def _write(path, *events):
    """Write events. The file has each of them while the run continues."""
    listener = MetricsFile(path)
    for event in events:
        listener(event)
    shown = path.read_text()
    listener.close()
    assert path.read_text() == shown


def _told(path):
    return [
        (row["event"], row["first_step"] if row["event"] == "start" else row["step"])
        for row in read_metrics(path)
    ]


def test_each_event_is_a_line(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    others = (
        Validated(1, 2.0, 5.0, 0.1),
        CheckpointSaved(1, "c", 0.2),
        RunEnded(1, "finished", 3.0, "runs/x"),
    )
    _write(path, _start(0), _step(1), *others)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["event"] for row in rows] == ["start", "step", "validation", "checkpoint", "end"]
    assert rows[1] == {
        "event": "step", "step": 1, "loss": 1.0, "grad_norm": 0.1, "learning_rate": 1e-3, "loss_scale": 1.0, "skipped": False,
        "weight": 10.0, "tokens": 12, "seconds": 0.5, "memory_bytes": 1024, "tokens_per_second": 24.0,
    }  # fmt: skip


def test_a_decision_about_communication_is_a_repeated_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _write(path, _start(0), _step(1), _step(2), CommunicationSelected(2, "int8 from here on"))
    line = {"event": "communication", "step": 2, "communication": "int8 from here on"}
    assert list(read_metrics(path))[-1] == line
    _write(path, _start(1), _step(2))
    assert _told(path) == [("start", 0), ("step", 1), ("start", 1), ("step", 2)]


def test_a_resume_drops_what_it_will_repeat(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = (_start(0), _step(1), _step(2), CheckpointSaved(2, "c", 0.1))
    _write(path, *kept, _step(3, loss=9.0), _step(4, loss=9.0))
    _write(path, _start(2), _step(3), _step(4))
    before = [("start", 0), ("step", 1), ("step", 2), ("checkpoint", 2)]
    assert _told(path) == [*before, ("start", 2), ("step", 3), ("step", 4)]
    assert all(row["loss"] == 1.0 for row in read_metrics(path) if row["event"] == "step")


def test_a_new_run_in_the_folder_starts_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _write(path, _start(0), _step(1))
    _write(path, _start(0), _step(1))
    assert _told(path) == [("start", 0), ("step", 1)]


def test_a_line_that_a_crash_cut_off_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _write(path, _start(0), _step(1))
    with open(path, "a") as stream:
        stream.write('{"event": "step", "st')
    _write(path, _start(1), _step(2))
    assert _told(path) == [("start", 0), ("step", 1), ("start", 1), ("step", 2)]


def test_a_broken_line_inside_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": \n{"event": "step", "step": 1}\n')
    with pytest.raises(InputError, match="line 1"):
        list(read_metrics(path))


def test_numbers_that_json_has_no_word_for_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _write(path, _start(0), _step(1, loss=math.nan), _step(2, loss=math.inf))
    assert [row["loss"] for row in read_metrics(path) if row["event"] == "step"] == [None, None]
