"""`plait doctor --validate` on simulated GPUs, as a user starts it: rows pass, planted defects fail them, and what has no times is not run.

A planted defect is a line of a copy of the package, so that the command itself needs no switch for tests.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_device.build import ROOT, environment

SECONDS = 1500
pytestmark = pytest.mark.timeout(2 * SECONDS)


def variables(place: Path, *, devices: int, mib: int | None, source: Path | None) -> dict[str, str]:
    """Of the command; with `source` a copy of the package comes first."""
    found = {**environment(devices=devices, mib=mib), "OMP_NUM_THREADS": "1", "PLAIT_CACHE": str(place / "cache")}
    first = [str(source)] if source is not None else [str(ROOT / "src")]
    return {**found, "PYTHONPATH": os.pathsep.join([*first, found["PYTHONPATH"]])}


def validate(
    place: Path, *only: str, devices: int = 2, mib: int | None = None, source: Path | None = None, code: int = 0
) -> dict[str, dict[str, Any]]:
    """Rows by name."""
    options = [word for name in only for word in ("--only", name)]
    ran = subprocess.run(
        [sys.executable, "-m", "plait", "doctor", "--validate", "--out", "found.json", "--minutes", "60", *options],
        cwd=place,
        env=variables(place, devices=devices, mib=mib, source=source),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    found = json.loads((place / "found.json").read_text())
    assert found["simulated"] and found["gpus_used"] == devices
    return {row["name"]: row for row in found["rows"]}


def planted(place: Path, file: str, line: str, instead: str) -> Path:
    """The folder of a copy of the package with one line replaced."""
    shutil.copytree(ROOT / "src" / "plait", place / "src" / "plait", ignore=shutil.ignore_patterns("__pycache__"))
    path = place / "src" / "plait" / file
    text = path.read_text()
    assert text.count(line) == 1, f"{file} has {text.count(line)} of {line!r}"
    path.write_text(text.replace(line, instead))
    return place / "src"


def outcomes(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: row["outcome"] for name, row in rows.items()}


def test_a_layout(device: Path, tmp_path: Path) -> None:
    """Two ranks over NCCL."""
    rows = validate(tmp_path, "parity/zero3-bf16")
    assert outcomes(rows) == {"parity/zero3-bf16": "passed"}, rows


NO_SUM = ("optim/gradient_norm.py", "        dist.all_reduce(total, group=group)", "        pass")
SCALED = (
    "dryrun/predicted_peak.py",
    "    return PredictedPeak(ledger, peak)",
    "    return PredictedPeak(ledger, replace(peak, peak_bytes=round(1.05 * peak.peak_bytes)))",
)


@pytest.mark.proof
def test_a_planted_defect_of_a_layout(device: Path, tmp_path: Path) -> None:
    """A norm of each rank's own shards: the row has failed, and names the first gradient; what runs on one rank has not."""
    rows = validate(tmp_path, "parity/zero3-bf16", "parity/one-gpu-bf16", source=planted(tmp_path, *NO_SUM), code=1)
    assert outcomes(rows) == {"parity/one-gpu-bf16": "passed", "parity/zero3-bf16": "failed"}, rows
    assert "gradient" in rows["parity/zero3-bf16"]["reason"]


@pytest.mark.proof
@pytest.mark.parametrize("defect", [None, SCALED])
def test_memory(device: Path, tmp_path: Path, defect: Sequence[str] | None) -> None:
    """Peaks are predicted to 2 %; scaled by 1.05 the rows have failed, and so has the largest model that should not fit."""
    source = None if defect is None else planted(tmp_path, *defect)
    rows = validate(tmp_path, "memory", "largest", devices=2, mib=512, source=source, code=0 if defect is None else 1)
    if defect is None:
        assert set(outcomes(rows).values()) == {"passed"}, rows
    else:
        assert outcomes(rows)["memory/one-rank"] == outcomes(rows)["memory/two-ranks"] == "failed", rows


@pytest.mark.proof
@pytest.mark.parametrize("devices", [1, 3])
def test_fewer_devices_than_ranks(device: Path, tmp_path: Path, devices: int) -> None:
    """Several ranks on a device, and a number that divides nothing."""
    only = ["parity/zero3-bf16", "parity/pp-1f1b", "parity/tp-zero3-bf16", "compression/int8", "checkpoint", "links"]
    rows = validate(tmp_path, *only, *(["parity/all-3-*"] if devices == 3 else []), devices=devices)
    timed = {name for name in rows if name.startswith("links")}
    assert {name for name, outcome in outcomes(rows).items() if outcome == "not run"} == timed, rows
    assert {outcome for name, outcome in outcomes(rows).items() if name not in timed} == {"passed"}, rows


@pytest.mark.proof
def test_a_device_without_memory(device: Path, tmp_path: Path) -> None:
    """The largest model cannot be looked for; everything that runs out of memory has failed and says so."""
    rows = validate(tmp_path, "largest", "parity/one-gpu-bf16", devices=1, mib=48, code=0)
    assert outcomes(rows)["largest/trains"] == "not run" and "needs 64.0 MiB" in rows["largest/trains"]["reason"], rows
    rows = validate(tmp_path, "parity/one-gpu-bf16", "links/host", devices=1, mib=1, code=1)
    assert outcomes(rows)["parity/one-gpu-bf16"] == "failed" and "memory" in rows["parity/one-gpu-bf16"]["reason"], rows


@pytest.mark.proof
def test_streaming(device: Path, tmp_path: Path) -> None:
    """The tokens of streamed weights are looked at; their rate is not."""
    rows = validate(tmp_path, "streaming", devices=1)
    assert outcomes(rows) == {"streaming/host": "passed", "streaming/files": "passed", "streaming/host-rate": "not run"}, rows


@pytest.mark.proof
def test_what_measures_times_runs(device: Path, tmp_path: Path) -> None:
    """All of it, to its end: none has failed, and none has passed, for a simulated device has no times."""
    rows = validate(tmp_path, "links", "step", "overlap", "planned", devices=2, code=1)
    assert set(outcomes(rows).values()) == {"not run"}, rows
    reasons = {name: row["reason"] for name, row in rows.items() if "DeepSpeed" not in row["title"]}
    assert all("what measures them ran" in reason for reason in reasons.values()), reasons


@pytest.mark.proof
def test_interrupted(device: Path, tmp_path: Path) -> None:
    """Ctrl-C: the document has every row, and no process is left."""
    command = [sys.executable, "-m", "plait", "doctor", "--validate", "--out", "found.json", "--only", "parity/zero*"]
    environ = variables(tmp_path, devices=2, mib=None, source=None)
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the machine; the first launch follows
        time.sleep(5)
        process.send_signal(signal.SIGINT)
        process.wait(120)
    assert process.returncode == 128 + signal.SIGINT
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["rows"] and {row["outcome"] for row in written["rows"]} <= {"passed", "not run"}
    assert written["rows"][-1]["reason"] == "interrupted"
