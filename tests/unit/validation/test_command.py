"""`plait doctor --validate` up to its processes: results, exit codes, the document, refusals."""

import json
import time
from pathlib import Path

import pytest

from plait.cli.main import main
from plait.cli.validating import command
from plait.errors import DeviceError
from plait.validation import runner
from tests.unit.validation import launches
from tests.unit.validation.launches import FACTS


def run(*arguments):
    try:
        return int(main(["doctor", "--validate", *arguments]) or 0)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Two GPUs, and the rows in the list that is returned, run by processes without torch."""
    rows = []
    monkeypatch.chdir(tmp_path)
    # The processes of the machine and of the launches are replaced, and nothing else.
    monkeypatch.setattr(command, "machine_facts", lambda: dict(FACTS))
    monkeypatch.setattr(command, "rows_of", lambda machine, only: list(rows))
    monkeypatch.setattr(command, "_launch_command", launches.command)
    return rows


def test_all_passed(machine, capsys):
    """A pipe gets a line per row, and the document has all numbers."""
    machine += [
        launches.row("planned/tp"),
        launches.row("nccl/step-tp", unavailable="there is one GPU"),
    ]
    assert run() == 0
    shown = capsys.readouterr().out
    assert (
        "2 of 2 GPUs (NVIDIA H100 80GB HBM3, 80.0 GiB), driver 580.95.05, torch 2.13.0+cu130"
        in shown
    )
    assert "2 rows, planned for 36 s on an H100, budget 8 minutes" in shown
    assert "passed   planned/tp" in shown and "ratio 1.00" in shown
    assert "not run  nccl/step-tp" in shown
    assert "1 passed, 0 failed, 1 not run" in shown
    document = json.loads(Path("validation.json").read_text())
    assert document["counts"] == {"passed": 1, "failed": 0, "not run": 1}
    assert document["format"] == 2 and document["gpus_used"] == 2
    assert [row["reason"] for row in document["rows"]] == ["", "there is one GPU"]
    assert document["rows"][0]["numbers"]["ratio"] == 1.0
    assert document["rows"][0]["numbers"]["error"] == "nan"
    assert document["rows"][0]["planned_seconds"] == 1.0


def test_one_failed(machine, capsys, tmp_path):
    machine += [
        launches.row("planned/tp"),
        launches.row("memory/stage-0", "fail"),
        launches.row("parity/bf16", "raise"),
    ]
    out = tmp_path / "made" / "x.json"
    assert run("--json", "--out", str(out), "--nproc-per-node", "1") == 1
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert document == json.loads(out.read_text())
    assert document["counts"] == {"passed": 1, "failed": 2, "not run": 0}
    assert document["gpus_used"] == 1
    assert "failed   memory/stage-0" in shown.err and "too large" in shown.err


def test_rows_that_do_not_fit(machine, capsys):
    """`--minutes` leaves out what is planned for longer, with the numbers."""
    machine += [launches.row("planned/tp"), launches.row("planned/pp", planned=500)]
    assert run("--minutes", "2") == 0
    shown = capsys.readouterr().out
    assert "not run  planned/pp" in shown and "planned for 500 s" in shown


def test_a_full_disk(machine, monkeypatch, capsys):
    """A full disk ends the command with a sentence; the results so far are on the screen."""

    def full(path, text):
        raise OSError(28, "No space left on device")

    machine += [launches.row("planned/tp")]
    monkeypatch.setattr(command, "write_atomically", full)
    began = time.monotonic()
    assert run() == 2
    # Processes that wait for their next row are stopped at once.
    assert time.monotonic() - began < runner.GRACE_SECONDS
    shown = capsys.readouterr()
    assert "passed   planned/tp" in shown.out
    assert "validation.json: cannot be written (No space left on device)" in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--minutes", "0"), "must be more than 0"),
        (("--seconds", "3"), "use --minutes"),
        (("--links",), "pass only one of them"),
        (("--out", "/proc/none/x.json"), "cannot be written"),
        (("--nproc-per-node", "3"), "this machine has 2 GPUs"),
        (("--list", "--nproc-per-node", "9"), "a validation uses 1 to 8 GPUs"),
    ],
)  # fmt: skip
def test_wrong_input(machine, arguments, message, capsys):
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_row_that_does_not_exist(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "machine_facts", lambda: dict(FACTS))
    assert run("--only", "parity/zero9", "--out", str(tmp_path / "x.json")) == 2
    shown = capsys.readouterr().err
    assert "--only parity/zero9: no row has this name; use one of ceilings, waits, parity" in shown


def test_the_list(capsys):
    """The table needs no GPU, and its sum is that of its lines."""
    assert run("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    seconds = [float(line.split()[0]) for line in lines[1:] if line.split()[1] == "s"]
    assert sum(seconds[:-1]) == seconds[-1] <= 480
    assert any("throughput/eager" in line for line in lines)
    assert run("--list", "--only", "checkpoint") == 0
    assert "checkpoint/tensor-to-offload" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("--minutes", "3"), ("--only", "parity"), ("--list",)])
def test_options_of_the_validation_alone(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(["doctor", *arguments])
    assert end.value.code == 2 and "add --validate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"driver": None, "accelerator": None}, "torch 2.13.0+cu130 (built for CUDA 13.0) sees no GPU on this machine"),
        ({"accelerator": None}, "the driver 580.95.05 answers, but torch 2.13.0+cu130"),
        ({"accelerator": "xpu"}, "has the accelerator 'xpu'"),
    ],
)  # fmt: skip
def test_without_a_gpu(changed, message, monkeypatch, tmp_path):
    """The command ends with a code of its own and a sentence."""
    facts = json.dumps({**FACTS, "devices": [], **changed})
    process = command.subprocess.CompletedProcess([], 0, facts, "")
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **__: process)
    with pytest.raises(DeviceError) as refused:
        command.machine_facts()
    assert message in str(refused.value) and refused.value.exit_code == 6
    assert run("--out", str(tmp_path / "x.json")) == 6 and not (tmp_path / "x.json").exists()


def test_a_driver_that_hangs_or_ends_its_process(monkeypatch):
    def hangs(*_, **__):
        raise command.subprocess.TimeoutExpired("python", 1)

    monkeypatch.setattr(command.subprocess, "run", hangs)
    with pytest.raises(DeviceError, match="nvidia-smi"):
        command.machine_facts()
    ended = command.subprocess.CompletedProcess([], -11, "", "Segmentation fault")
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(DeviceError, match="Segmentation fault"):
        command.machine_facts()
