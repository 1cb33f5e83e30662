"""The command on simulated GPUs, in processes as a user starts them: nothing knows that they are simulated."""

from __future__ import annotations

import email
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.tiny import llama
from tests.simulated_device.build import ROOT, environment

SECONDS = 280
pytestmark = pytest.mark.timeout(2 * SECONDS)

SMALL: dict[str, Any] = {
    "train_batch_size": 4,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "model": llama(hidden_size=64, intermediate_size=128, max_position_embeddings=64),
    "data": {
        "source": "files",
        "paths": [f"{Path(email.__file__).parent}/*.py"],
        "vocab_size": 400,
        "sequence_length": 48,
    },
    "run": {"steps": 5, "log_every": 1, "validate_every": 3, "validate_sequences": 4},
}


def plait(place, *arguments, devices=2):
    """What it prints; the processes that it starts have the devices too."""
    ran = subprocess.run(
        [sys.executable, "-m", "plait", *arguments],
        cwd=place,
        env={
            **environment(devices=devices),
            "OMP_NUM_THREADS": "1",
            "PLAIT_CACHE": str(place / "cache"),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_doctor(device, tmp_path):
    """Names what it finds."""
    found = json.loads(plait(tmp_path, "doctor", "--json"))
    assert found["gpus"]["count"] == 2, found
    assert "simulated device" in json.dumps(found)
    assert "2.28.9" in json.dumps(found)


def test_train(device, tmp_path):
    """Two GPUs, a validation and a checkpoint; every step has its seconds."""
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    plait(tmp_path, "train", "small.json")
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    steps = [
        line
        for line in map(json.loads, metrics.read_text().splitlines())
        if "loss" in line and "seconds" in line
    ]
    assert len(steps) >= SMALL["run"]["steps"]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert any(line.get("memory_bytes") for line in steps)


def test_a_dry_run_on_the_device(device, tmp_path):
    """One rank of two, alone on one GPU, with true peaks."""
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    told = plait(
        tmp_path,
        "dryrun",
        "small.json",
        "--on-device",
        "--world-size",
        "2",
        "--gpu",
        "h100",
        devices=1,
    )
    assert "simulated device" in told, told


def test_calibration_of_a_device_that_the_planner_does_not_know(device, tmp_path):
    """Is refused, with those that it knows. What is measured of a known one has a GPU's sizes, too large for the host; its parts are run by
    `test_waits`."""
    with pytest.raises(
        AssertionError, match="GPU 'simulated device .* not in the catalogue; known are v100"
    ):
        plait(tmp_path, "calibrate", "--rounds", "1", "--steps", "1", "--out", "here.json")
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.wide
def test_what_is_marked_gpu(device):
    """The tests that need a GPU, on a simulated one."""
    places = ["tests/parity/test_offload_gpu.py", "tests/fake/test_dry_run.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *places]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(devices=2),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
