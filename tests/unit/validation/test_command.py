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
    """Return the exit code of the command."""
    try:
        return int(main(["doctor", "--validate", *arguments]) or 0)
    except SystemExit as error:
        return int(error.code or 0)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A list for the rows of a machine with two GPUs, run by processes without torch."""
    rows = []
    monkeypatch.chdir(tmp_path)
    # The machine and the processes are replaced, and nothing else.
    monkeypatch.setattr(command, "machine_facts", lambda: dict(FACTS))
    monkeypatch.setattr(command, "rows_of", lambda machine, only: list(rows))
    monkeypatch.setattr(command, "_launch_command", launches.command)
    return rows


def test_a_line_and_an_entry_in_the_document_per_row(machine, capsys):
    machine.append(launches.row("planned/tp"))
    machine.append(launches.unavailable_row("nccl/step-tp", "there is one GPU"))
    assert run() == 0
    output = capsys.readouterr().out
    gpus = "2 of 2 GPUs (NVIDIA H100 80GB HBM3, 80.0 GiB), driver 580.95.05, torch 2.13.0+cu130"
    assert gpus in output
    assert "2 rows, planned for 36 s on an H100, budget 8 minutes" in output
    assert "passed   planned/tp" in output and "ratio 1.00" in output
    assert "not run  nccl/step-tp" in output
    assert "1 passed, 0 failed, 1 not run" in output

    document = json.loads(Path("validation.json").read_text())
    assert document["counts"] == {"passed": 1, "failed": 0, "not run": 1}
    assert document["format"] == 2 and document["gpus_used"] == 2
    passed, not_run = document["rows"]
    assert passed["reason"] == "" and not_run["reason"] == "there is one GPU"
    assert passed["numbers"]["ratio"] == 1.0 and passed["numbers"]["error"] == "nan"
    assert passed["planned_seconds"] == 1.0


def test_a_failed_row_is_in_the_exit_code(machine, capsys, tmp_path):
    machine.append(launches.row("planned/tp"))
    machine.append(launches.row("memory/stage-0", "fail"))
    machine.append(launches.row("parity/bf16", "raise"))
    out = tmp_path / "new" / "x.json"
    assert run("--json", "--out", str(out), "--nproc-per-node", "1") == 1
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert document == json.loads(out.read_text())
    assert document["counts"] == {"passed": 1, "failed": 2, "not run": 0}
    assert document["gpus_used"] == 1
    assert "failed   memory/stage-0" in output.err and "too large" in output.err


def test_minutes_leave_out_longer_rows(machine, capsys):
    machine.append(launches.row("planned/tp"))
    machine.append(launches.row("planned/pp", planned=500))
    assert run("--minutes", "2") == 0
    output = capsys.readouterr().out
    assert "not run  planned/pp" in output and "planned for 500 s" in output


def test_a_full_disk_is_reported_after_the_results(machine, monkeypatch, capsys):
    def write(path, text):
        raise OSError(28, "No space left on device")

    machine.append(launches.row("planned/tp"))
    monkeypatch.setattr(command, "write_atomically", write)
    start = time.monotonic()
    assert run() == 2
    # Processes that wait for their next row are stopped at once.
    assert time.monotonic() - start < runner.GRACE_SECONDS
    output = capsys.readouterr()
    assert "passed   planned/tp" in output.out
    assert "validation.json: cannot be written (No space left on device)" in output.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--minutes 0", "must be more than 0"),
        ("--seconds 3", "use --minutes"),
        ("--links", "pass only one of them"),
        ("--out /proc/none/x.json", "cannot be written"),
        ("--nproc-per-node 3", "this machine has 2 GPUs"),
        ("--list --nproc-per-node 9", "a validation uses 1 to 8 GPUs"),
    ],
)
def test_wrong_options_are_refused(machine, arguments, message, capsys):
    assert run(*arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_row_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "machine_facts", lambda: dict(FACTS))
    assert run("--only", "parity/zero9", "--out", str(tmp_path / "x.json")) == 2
    message = "--only parity/zero9: no row has this name; use one of ceilings, waits, parity"
    assert message in capsys.readouterr().err


def test_the_list_needs_no_gpu(capsys):
    assert run("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    seconds = [float(line.split()[0]) for line in lines[1:] if line.split()[1] == "s"]
    # The last line is the sum.
    assert sum(seconds[:-1]) == seconds[-1] <= 480
    assert any("throughput/eager" in line for line in lines)
    assert run("--list", "--only", "checkpoint") == 0
    assert "checkpoint/tensor-to-offload" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ["--minutes 3", "--only parity", "--list"])
def test_options_that_require_validate(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(["doctor", *arguments.split()])
    assert error.value.code == 2 and "add --validate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"driver": None, "accelerator": None},
            "(built for CUDA 13.0) sees no GPU on this machine",
        ),
        ({"accelerator": None}, "the driver 580.95.05 answers, but torch 2.13.0+cu130"),
        ({"accelerator": "xpu"}, "has the accelerator 'xpu'"),
    ],
)
def test_a_machine_without_a_gpu_has_its_own_exit_code(changes, message, monkeypatch, tmp_path):
    facts = json.dumps({**FACTS, "devices": [], **changes})
    process = command.subprocess.CompletedProcess([], 0, facts, "")
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **__: process)
    with pytest.raises(DeviceError) as error:
        command.machine_facts()
    assert message in str(error.value) and error.value.exit_code == 6
    assert run("--out", str(tmp_path / "x.json")) == 6 and not (tmp_path / "x.json").exists()


def test_a_driver_that_hangs_or_ends_its_process(monkeypatch):
    def hang(*_, **__):
        raise command.subprocess.TimeoutExpired("python", 1)

    monkeypatch.setattr(command.subprocess, "run", hang)
    with pytest.raises(DeviceError, match="nvidia-smi"):
        command.machine_facts()
    process = command.subprocess.CompletedProcess([], -11, "", "Segmentation fault")
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **__: process)
    with pytest.raises(DeviceError, match="Segmentation fault"):
        command.machine_facts()
