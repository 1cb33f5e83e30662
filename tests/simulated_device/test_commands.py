"""Commands on simulated GPUs, in processes as a user starts them."""

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
    """Run a command and return its output. Processes that it starts have the devices, too."""
    done = subprocess.run(
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
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_doctor(device, tmp_path):
    report = json.loads(plait(tmp_path, "doctor", "--json"))
    assert report["gpus"]["count"] == 2, report
    assert "simulated device" in json.dumps(report)
    assert "2.28.9" in json.dumps(report)


def test_train(device, tmp_path):
    """Two GPUs run validations and a checkpoint, and the metrics have the time of every step."""
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    plait(tmp_path, "train", "small.json")
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    rows = map(json.loads, metrics.read_text().splitlines())
    steps = [row for row in rows if "loss" in row and "seconds" in row]
    assert len(steps) >= SMALL["run"]["steps"]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert any(line.get("memory_bytes") for line in steps)


def test_dry_run_on_the_device(device, tmp_path):
    """A rank of two runs without the other on one GPU, with real peaks."""
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    options = "--on-device --world-size 2 --gpu h100"
    output = plait(tmp_path, "dryrun", "small.json", *options.split(), devices=1)
    assert "simulated device" in output, output


def test_calibration_of_an_unknown_device_is_refused(device, tmp_path):
    """A known GPU would be measured at sizes that are too large for the host. test_waits.py runs
    the parts of a calibration."""
    message = "GPU 'simulated device .* not in the catalogue; known are v100"
    with pytest.raises(AssertionError, match=message):
        plait(tmp_path, "calibrate", "--rounds", "1", "--steps", "1", "--out", "here.json")
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.wide
def test_tests_that_need_a_gpu(device):
    files = ["tests/parity/test_offload_gpu.py", "tests/fake/test_dry_run.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(devices=2),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
