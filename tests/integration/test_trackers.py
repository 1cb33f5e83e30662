"""`plait train` with trackers: the first process records what metrics.jsonl has."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.tiny import llama


def test_a_run_with_trackers(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one and two make three. " * 600)
    trackers = ["csv_monitor"]
    if find_spec("tensorboard") and find_spec("accelerate"):
        trackers.append("tensorboard")
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "model": llama(),
        "data": {
            "source": "files",
            "paths": [str(tmp_path / "text.txt")],
            "sequence_length": 32,
            "vocab_size": 300,
        },
        "run": {"folder": "run", "steps": 3, "processes": 2},
        **{name: {"enabled": True} for name in trackers},
    }
    (tmp_path / "run.json").write_text(json.dumps(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PLAIT_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "plait", "train", "run.json"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    expected = [(row["step"], row["loss"]) for row in rows if row["event"] == "step"]
    with open(tmp_path / "run" / "csv_monitor" / "train_loss.csv", newline="") as stream:
        recorded = [(int(step), float(loss)) for step, loss in list(csv.reader(stream))[1:]]
    assert recorded == expected and len(expected) == 3
    assert (tmp_path / "run" / "csv_monitor" / "validation_loss.csv").is_file()
    if "tensorboard" not in trackers:
        return
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("train/loss")
    assert [scalar.step for scalar in scalars] == [1, 2, 3]
    assert [scalar.value for scalar in scalars] == pytest.approx([loss for _, loss in expected])
