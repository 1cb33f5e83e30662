"""`plait train` with the user's own callbacks: every process hears the run, and the tutorial's ends it early, to be gone on with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.tiny import llama

ROOT = Path(__file__).parents[2]
HEARD = """
from pathlib import Path

class Heard:
    def __call__(self, event, engine):
        with Path(f"heard-{engine.rank}").open("a") as file:
            print(type(event).__name__, getattr(event, "step", ""), file=file)
"""


@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_a_run_is_heard_and_ended(tmp_path: Path, goes_on: bool) -> None:
    (block,) = [
        text
        for text in re.findall(
            r"```python\n(.*?)```",
            (ROOT / "docs" / "tutorials" / "first-run.md").read_text(),
            re.DOTALL,
        )
        if "def stop_early" in text
    ]
    (tmp_path / "my_callbacks.py").write_text(
        block.replace("event.loss < 0.1", "event.step == 3") + HEARD
    )
    (tmp_path / "text.txt").write_text("one and two make three. " * 600)
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
        "run": {
            "folder": "run",
            "steps": 12,
            "processes": 2,
            "callbacks": ["my_callbacks:stop_early", "my_callbacks:Heard"],
        },
    }
    (tmp_path / "run.json").write_text(json.dumps(config))

    def train(*arguments: str) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PLAIT_CACHE": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "plait", "train", "run.json", *arguments]
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
        return done.stdout

    told = train()
    assert "ended by a callback" in told and "resume with" in told
    heard = [(tmp_path / f"heard-{rank}").read_text().splitlines() for rank in (0, 1)]
    assert (
        heard[0]
        == heard[1]
        == [
            "RunStarted ",
            *(f"StepDone {step}" for step in range(1, 5)),
            "CheckpointSaved 4",
            "RunEnded 4",
        ]
    )
    if not goes_on:
        return
    told = train("--set", "run.callbacks=[]", "--set", "run.steps=6")
    assert "finished" in told
    steps = [
        row["step"]
        for row in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        if row["event"] == "step"
    ]
    assert steps == [1, 2, 3, 4, 5, 6]
