"""metrics.jsonl has every step once, in order, through crashes and resumed runs."""

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


def start(first):
    return RunStarted(first, 10, 2, 100, "dp_shard=2", "runs/x")


def step(number, loss=1.0):
    return StepDone(number, loss, 0.1, 1e-3, 1.0, False, 10.0, 12, 0.5, 1024)


def write(path, *events):
    """Write events. All of them must be in the file while the run continues."""
    listener = MetricsFile(path)
    for event in events:
        listener(event)
    before_close = path.read_text()
    listener.close()
    assert path.read_text() == before_close


def summary(path):
    """Return `start0 step1 ...` for the lines of a file."""
    rows = read_metrics(path)
    return " ".join(f"{row['event']}{row.get('first_step', row.get('step'))}" for row in rows)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def test_each_event_is_a_line(path):
    saved = CheckpointSaved(1, "c", 0.2)
    ended = RunEnded(1, "finished", 3.0, "runs/x")
    write(path, start(0), step(1), Validated(1, 2.0, 5.0, 0.1), saved, ended)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["event"] for row in rows] == ["start", "step", "validation", "checkpoint", "end"]
    assert rows[1] == {
        "event": "step",
        "step": 1,
        "loss": 1.0,
        "grad_norm": 0.1,
        "learning_rate": 1e-3,
        "loss_scale": 1.0,
        "skipped": False,
        "weight": 10.0,
        "tokens": 12,
        "seconds": 0.5,
        "memory_bytes": 1024,
        "tokens_per_second": 24.0,
    }


def test_a_resumed_run_drops_the_lines_that_it_repeats(path):
    selected = CommunicationSelected(3, "int8 from here on")
    saved = CheckpointSaved(2, "c", 0.1)
    write(path, start(0), step(1), step(2), saved, step(3, loss=9.0), selected)
    line = {"event": "communication", "step": 3, "communication": "int8 from here on"}
    assert list(read_metrics(path))[-1] == line
    write(path, start(2), step(3), step(4))
    assert summary(path) == "start0 step1 step2 checkpoint2 start2 step3 step4"
    assert all(row["loss"] == 1.0 for row in read_metrics(path) if row["event"] == "step")


def test_a_new_run_in_the_folder_starts_an_empty_file(path):
    for _ in range(2):
        write(path, start(0), step(1))
        assert summary(path) == "start0 step1"


def test_a_line_that_a_crash_cut_off_is_dropped(path):
    write(path, start(0), step(1))
    with open(path, "a") as stream:
        stream.write('{"event": "step", "st')
    write(path, start(1), step(2))
    assert summary(path) == "start0 step1 start1 step2"


def test_a_damaged_line_before_the_last_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": \n{"event": "step", "step": 1}\n')
    with pytest.raises(InputError, match="line 1"):
        list(read_metrics(path))


def test_numbers_that_json_lacks_are_null(path):
    write(path, start(0), step(1, loss=math.nan), step(2, loss=math.inf))
    assert [row["loss"] for row in read_metrics(path) if row["event"] == "step"] == [None, None]
