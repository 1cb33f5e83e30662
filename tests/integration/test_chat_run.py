"""`plait train` on conversations, whole ones in a row: a run that goes on with other processes has the losses of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plait.cli.main import main
from tests.integration.tiny import llama
from tests.unit.data.byte_tokenizer import tokenizer


def conversations(count: int) -> list[dict[str, Any]]:
    """Of different lengths."""
    found = []
    for number in range(count):
        turns = [
            [
                ("user", f"{number} + {turn}?"),
                ("assistant", f"It is {number + turn}. " * (1 + number % 3)),
            ]
            for turn in range(1 + number % 2)
        ]
        found.append(
            {"messages": [{"role": role, "content": text} for turn in turns for role, text in turn]}
        )
    return found


def losses(
    folder: Path, config: dict[str, Any], *, processes: int, steps: int, run: str
) -> list[float]:
    """By step, of everything that the run's folder has."""
    file = folder / f"{run}-{steps}.json"
    file.write_text(
        json.dumps(
            {
                **config,
                "run": {
                    "folder": str(folder / run),
                    "steps": steps,
                    "processes": processes,
                },
            }
        )
    )
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PLAIT_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "plait", "train", str(file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "chat.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in conversations(40))
    )
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "model": {**llama(), "dtype": "float64"},
        "data": {
            "source": "jsonl",
            "paths": [str(tmp_path / "chat.jsonl")],
            "format": "chat",
            "packing": "documents",
            "tokenizer": str(tmp_path / "tokenizer"),
            "sequence_length": 96,
            "validation_fraction": 0.1,
        },
    }


@pytest.mark.proof
def test_a_run_goes_on_with_other_processes(tmp_path: Path, config: dict[str, Any]) -> None:
    """In the middle of an epoch, and over its end."""
    wanted = losses(tmp_path, config, processes=1, steps=6, run="one")
    losses(tmp_path, config, processes=2, steps=3, run="two")
    found = losses(tmp_path, config, processes=1, steps=6, run="two")
    assert len(wanted) == 6 and found == pytest.approx(wanted, rel=1e-6)
    assert wanted[-1] < 0.8 * wanted[0]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"packing": None}, "data.packing"),
        ({"scored": "all"}, "data.format"),
    ],
)
def test_other_sequences_are_another_run(
    tmp_path: Path,
    config: dict[str, Any],
    changes: dict[str, Any],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    losses(tmp_path, config, processes=1, steps=1, run="one")
    config["data"] |= changes
    config["run"] = {"folder": str(tmp_path / "one"), "steps": 2, "processes": 1}
    (tmp_path / "again.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as end:
        main(["train", str(tmp_path / "again.json")])
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_a_model_that_may_see_other_documents_is_refused(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config["model"] = {
        "config": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 2}
    }
    config["run"] = {"folder": str(tmp_path / "one"), "steps": 2, "processes": 1}
    (tmp_path / "run.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as end:
        main(["train", str(tmp_path / "run.json")])
    assert (
        end.value.code == 2
        and "data.packing = 'documents': bloom has not been tested to keep attention within"
        in capsys.readouterr().err
    )
