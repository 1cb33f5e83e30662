"""`plait train` on a data set that is read as it is needed: a killed run goes on with other processes, and has one process's losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from plait.cli.main import main
from tests.integration.tiny import llama
from tests.unit.data.byte_tokenizer import tokenizer

STEPS = 24


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    from datasets import Dataset

    tokenizer().save_pretrained(tmp_path / "tokenizer")
    rows = [
        {"text": f"{number} and {number + 1} make {2 * number + 1}. " * (1 + number % 5)}
        for number in range(150)
    ]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "rows"))
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "model": {**llama(), "dtype": "float64"},
        "data": {
            "source": "datasets",
            "paths": [str(tmp_path / "rows")],
            "streaming": True,
            "buffer_sequences": 16,
            "tokenizer": str(tmp_path / "tokenizer"),
            "sequence_length": 96,
            "validation_fraction": 0.1,
        },
    }


def started(
    folder: Path, config: dict[str, Any], run: str, processes: int, **parallel: int
) -> subprocess.Popen[str]:
    section = {
        "folder": str(folder / run),
        "steps": STEPS,
        "processes": processes,
        "checkpoint_every": 3,
    }
    file = folder / f"{run}-{processes}.json"
    file.write_text(json.dumps({**config, "parallel": parallel, "run": section}))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PLAIT_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "plait", "train", str(file)]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def losses(folder: Path, run: str) -> dict[int, list[float]]:
    """By step, of everything that the run's folder has."""
    file, found = folder / run / "metrics.jsonl", dict[int, list[float]]()
    for line in file.read_text().splitlines() if file.exists() else []:
        row = json.loads(line)
        if row["event"] == "step":
            found.setdefault(row["step"], []).append(row["loss"])
    return found


def killed_after(step: int, folder: Path, run: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while (
        step not in losses(folder, run) and process.poll() is None and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    output = process.communicate()[0]
    assert step in losses(folder, run), output[-3000:]


@pytest.mark.proof
def test_a_killed_run_goes_on_on_other_layouts(tmp_path: Path, config: dict[str, Any]) -> None:
    """Two data-parallel processes, then tp 2, then one; over the ends of blocks and of an epoch."""
    whole = started(tmp_path, config, "one", 1)
    output = whole.communicate(timeout=300)[0]
    assert whole.returncode == 0, output[-3000:]
    wanted = losses(tmp_path, "one")
    killed_after(7, tmp_path, "parts", started(tmp_path, config, "parts", 2))
    killed_after(16, tmp_path, "parts", started(tmp_path, config, "parts", 2, tp=2))
    last = started(tmp_path, config, "parts", 1)
    output = last.communicate(timeout=300)[0]
    assert last.returncode == 0, output[-3000:]
    found = losses(tmp_path, "parts")
    assert sorted(found) == sorted(wanted) == list(range(1, STEPS + 1))
    for step, values in found.items():
        assert values == pytest.approx(wanted[step] * len(values), rel=1e-9), step
    assert wanted[STEPS][0] < 0.8 * wanted[1][0]


@pytest.mark.proof
def test_another_buffer_is_another_run(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = started(tmp_path, config, "one", 1)
    output = whole.communicate(timeout=300)[0]
    assert whole.returncode == 0, output[-3000:]
    config["data"]["buffer_sequences"] = 32
    config["run"] = {"folder": str(tmp_path / "one"), "steps": 30, "processes": 1}
    (tmp_path / "again.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as end:
        main(["train", str(tmp_path / "again.json")])
    assert end.value.code == 2 and "data.buffer_sequences" in capsys.readouterr().err
