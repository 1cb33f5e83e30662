"""`plait doctor --validate` on simulated GPUs, as a user starts it.

Rows pass, and planted defects fail them. Rows about times run to their end without a result. A
planted defect is a changed line in a copy of the package, so the command has no switch for tests.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from plait.validation.context import NO_TIMES
from plait.validation.profile import NO_WARNINGS
from tests.simulated_device.build import ROOT, environment

SECONDS = 1500
pytestmark = pytest.mark.timeout(2 * SECONDS)


def variables(place, *, devices, mib, source):
    """Return the environment of the command. With `source`, a copy of the package comes first."""
    environ = {
        **environment(devices=devices, mib=mib),
        "OMP_NUM_THREADS": "1",
        "PLAIT_CACHE": str(place / "cache"),
    }
    package = str(source) if source is not None else str(ROOT / "src")
    return {**environ, "PYTHONPATH": os.pathsep.join([package, environ["PYTHONPATH"]])}


def validate(place, *only, devices=2, mib=None, source=None, code=0):
    """Run the command and return its rows by name."""
    options = [word for name in only for word in ("--only", name)]
    command = [sys.executable, "-m", "plait", "doctor", "--validate", "--out", "found.json"]
    process = subprocess.run(
        [*command, "--minutes", "60", *options],
        cwd=place,
        env=variables(place, devices=devices, mib=mib, source=source),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert process.returncode == code, process.stdout + process.stderr
    document = json.loads((place / "found.json").read_text())
    assert document["simulated"] and document["gpus_used"] == devices
    return {row["name"]: row for row in document["rows"]}


def planted(place, file, line, instead):
    """Return the folder of a copy of the package with one line replaced."""
    shutil.copytree(
        ROOT / "src" / "plait",
        place / "src" / "plait",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    path = place / "src" / "plait" / file
    text = path.read_text()
    assert text.count(line) == 1, f"{file} has {text.count(line)} of {line!r}"
    path.write_text(text.replace(line, instead))
    return place / "src"


def outcomes(rows):
    return {name: row["outcome"] for name, row in rows.items()}


def test_a_layout(device, tmp_path):
    """Two ranks over NCCL."""
    rows = validate(tmp_path, "nccl/parity-zero-3")
    assert outcomes(rows) == {"nccl/parity-zero-3": "passed"}, rows


NO_SUM = ("sharded/step.py", "        dist.all_reduce(total, group=group)", "        pass")
SCALED = (
    "dryrun/predicted_peak.py",
    "    return PredictedPeak(ledger, peak)",
    "    return PredictedPeak(ledger, replace(peak, peak_bytes=round(1.05 * peak.peak_bytes)))",
)
NOT_SIMULATED = {
    "parity/compile": "torch.compile cannot be simulated",
    "parity/attention-kernels": "fused attention cannot be simulated",
    "throughput/compiled": "torch.compile cannot be simulated",
    "throughput/liger": "Liger is not installed",
    "throughput/deepspeed": "DeepSpeed is not installed",
}


@pytest.mark.proof
def test_the_whole_validation(device, tmp_path):
    """The default rows of one GPU: none fails, and each that does not pass names why."""
    rows = validate(tmp_path, devices=1)
    assert "failed" not in outcomes(rows).values(), rows
    passed = {name for name, outcome in outcomes(rows).items() if outcome == "passed"}
    configurations = {
        "bf16",
        "bf16-stage-3",
        "fp16",
        "recompute-full",
        "recompute-selective",
        "loss-in-chunks",
        "host-offload",
    }
    layouts = {"stage-0", "stage-3", "recompute", "loss-in-chunks"}
    assert passed == {f"parity/{name}" for name in configurations} | {
        f"memory/{name}" for name in layouts
    }
    for name, row in rows.items():
        if name in passed:
            continue
        expected = NOT_SIMULATED.get(name, NO_TIMES)
        if name.startswith("waits/"):
            expected = NO_WARNINGS
        if name.startswith("nccl/"):
            expected = "there is one GPU; ranks that share a GPU"
        assert expected in row["reason"], (name, row["reason"])
    assert not (tmp_path / "found.calibration.json").exists()


@pytest.mark.proof
def test_rows_of_several_devices(device, tmp_path):
    """Parity over NCCL passes; step times beside torch's peers run to their end."""
    rows = validate(tmp_path, "nccl", devices=2)
    parity = {name for name in rows if "parity" in name}
    assert {rows[name]["outcome"] for name in parity} == {"passed"}, rows
    assert {rows[name]["reason"] for name in rows.keys() - parity} == {NO_TIMES}, rows


@pytest.mark.proof
def test_a_planted_defect_of_a_layout(device, tmp_path):
    """A norm without the sum over ranks fails the row of the layout, and not that of one rank."""
    source = planted(tmp_path, *NO_SUM)
    rows = validate(tmp_path, "parity/layout-zero-3", "parity/bf16", source=source, code=1)
    assert outcomes(rows) == {"parity/bf16": "passed", "parity/layout-zero-3": "failed"}, rows
    assert "gradient" in rows["parity/layout-zero-3"]["reason"]


@pytest.mark.proof
@pytest.mark.parametrize("defect", [None, SCALED])
def test_memory(device, tmp_path, defect):
    """Peaks are predicted to 2 %. With a prediction that is scaled by 1.05 the rows fail."""
    source = None if defect is None else planted(tmp_path, *defect)
    code = 0 if defect is None else 1
    rows = validate(tmp_path, "memory", "largest", devices=2, mib=512, source=source, code=code)
    if defect is None:
        assert set(outcomes(rows).values()) == {"passed"}, rows
    else:
        assert outcomes(rows)["memory/stage-0"] == outcomes(rows)["memory/two-ranks"] == "failed", (
            rows
        )


@pytest.mark.proof
@pytest.mark.parametrize("devices", [1, 3])
def test_fewer_devices_than_ranks(device, tmp_path, devices):
    """Several ranks share a device, and a number of devices divides nothing."""
    layouts = ["layout-zero-3", "layout-pp-1f1b", "layout-tp-zero-3"]
    only = [*(f"parity/{name}" for name in layouts), "compression/int8", "checkpoint"]
    if devices == 3:
        only += ["parity/layout-all-3-*", "nccl/parity-zero-3"]
    rows = validate(tmp_path, *only, devices=devices)
    assert set(outcomes(rows).values()) == {"passed"}, rows


@pytest.mark.proof
def test_a_device_without_memory(device, tmp_path):
    """Rows that run out of memory fail and say so, and the rows after them run."""
    rows = validate(tmp_path, "largest", "parity/bf16", devices=1, mib=48, code=0)
    assert outcomes(rows)["largest/trains"] == "not run"
    assert "needs 64.0 MiB" in rows["largest/trains"]["reason"], rows
    rows = validate(tmp_path, "parity/bf16", "ceilings/host-link", devices=1, mib=1, code=1)
    assert outcomes(rows)["parity/bf16"] == "failed"
    assert "memory" in rows["parity/bf16"]["reason"], rows


@pytest.mark.proof
def test_streaming(device, tmp_path):
    """The tokens of streamed weights are compared; their rate is not."""
    rows = validate(tmp_path, "streaming", devices=1)
    assert outcomes(rows) == {
        "streaming/host": "passed",
        "streaming/files": "passed",
        "streaming/host-rate": "not run",
    }, rows


@pytest.mark.proof
def test_a_rank_of_a_plan(device, tmp_path):
    """Rows that measure times run to their end."""
    rows = validate(tmp_path, "planned", devices=1, code=1)
    assert {row["reason"] for row in rows.values()} == {NO_TIMES}, rows


@pytest.mark.proof
def test_interrupted(device, tmp_path):
    """The document has every row after Ctrl-C."""
    arguments = "-m plait doctor --validate --out found.json --only parity/layout-zero*"
    command = [sys.executable, *arguments.split()]
    environ = variables(tmp_path, devices=2, mib=None, source=None)
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # The line of the machine. The first launch follows.
        time.sleep(5)
        process.send_signal(signal.SIGINT)
        process.wait(120)
    assert process.returncode == 128 + signal.SIGINT
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["rows"] and {row["outcome"] for row in written["rows"]} <= {"passed", "not run"}
    assert written["rows"][-1]["reason"] == "interrupted"
