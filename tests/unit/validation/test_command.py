"""`plait doctor --validate` up to its processes: results, exit codes, the document, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.cli.main import main
from plait.cli.validating import command
from plait.errors import DeviceError
from plait.validation.rows import Row
from tests.unit.validation import launches
from tests.unit.validation.launches import FACTS


def run(*arguments: str) -> int:
    """The command's exit code."""
    try:
        return int(main(["doctor", "--validate", *arguments]) or 0)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Row]:
    """Two GPUs, and the rows in the list that is returned, run by processes without torch."""
    rows: list[Row] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "machine_facts", lambda: dict(FACTS))
    monkeypatch.setattr(command, "rows_of", lambda machine, only: list(rows))
    monkeypatch.setattr(command, "_command", launches.command)
    return rows


def test_all_passed(machine: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    """One line a row in a pipe, and the document."""
    machine += [launches.row("step/ddp"), launches.row("links/gpus", without="there is one GPU")]
    assert run() == 0
    shown = capsys.readouterr().out
    assert "2 of 2 GPUs (NVIDIA H100 80GB HBM3, 80.0 GiB), driver 580.95.05, torch 2.13.0+cu130" in shown
    assert "passed   step/ddp" in shown and "ratio 1.00" in shown and "not run  links/gpus" in shown
    assert "1 passed, 0 failed, 1 not run" in shown
    found = json.loads(Path("validation.json").read_text())
    assert found["counts"] == {"passed": 1, "failed": 0, "not run": 1} and found["format"] == 1 and found["gpus_used"] == 2
    assert [row["reason"] for row in found["rows"]] == ["", "there is one GPU"]
    assert found["rows"][0]["numbers"] == {"ratio": 1.0, "error": "nan"}


def test_one_failed(machine: list[Row], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    machine += [launches.row("step/ddp"), launches.row("memory/one-rank", "fail"), launches.row("parity/tp", "raise")]
    assert run("--json", "--out", str(tmp_path / "made" / "x.json"), "--nproc-per-node", "1") == 1
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found == json.loads((tmp_path / "made" / "x.json").read_text())
    assert found["counts"] == {"passed": 1, "failed": 2, "not run": 0} and found["gpus_used"] == 1
    assert "failed   memory/one-rank" in shown.err and "too large" in shown.err


def test_nothing_ran(machine: list[Row]) -> None:
    machine += [launches.row("parity/tp", without="Transformers is not installed")]
    assert run() == 1


def test_a_full_disk(machine: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk ends the command with a sentence; what was found is on the screen."""

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    machine += [launches.row("step/ddp")]
    monkeypatch.setattr(command, "write_whole", full)
    assert run() == 2
    shown = capsys.readouterr()
    assert "passed   step/ddp" in shown.out and "validation.json: cannot be written (No space left on device)" in shown.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--minutes", "0"), "not more than 0"),
        (("--seconds", "3"), "use --minutes"),
        (("--links",), "one of them at a time"),
        (("--out", "/proc/none/x.json"), "cannot be written"),
        (("--nproc-per-node", "3"), "this machine has 2 GPUs"),
    ],
)
def test_wrong_input(machine: list[Row], arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert told in capsys.readouterr().err


def test_a_row_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(command, "machine_facts", lambda: dict(FACTS))
    assert run("--only", "parity/zero9", "--out", str(tmp_path / "x.json")) == 2
    assert "--only parity/zero9: no row has this name; checks are links, memory, parity" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--minutes", "3"), ("--only", "parity")])
def test_options_of_the_validation_alone(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", *arguments])
    assert end.value.code == 2 and "add --validate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"driver": None, "accelerator": None}, "torch 2.13.0+cu130 (built for CUDA 13.0) sees no GPU on this machine"),
        ({"accelerator": None}, "the driver 580.95.05 answers, but torch 2.13.0+cu130"),
        ({"accelerator": "xpu"}, "has the accelerator 'xpu'"),
    ],
)
def test_without_a_gpu(changed: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A code of its own, and a sentence."""
    facts = json.dumps({**FACTS, "devices": [], **changed})
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **__: command.subprocess.CompletedProcess([], 0, facts, ""))
    with pytest.raises(DeviceError) as refused:
        command.machine_facts()
    assert told in str(refused.value) and refused.value.exit_code == 6
    assert run("--out", str(tmp_path / "x.json")) == 6 and not (tmp_path / "x.json").exists()


def test_a_driver_that_hangs_or_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: Any, **__: Any) -> Any:
        raise command.subprocess.TimeoutExpired("python", 1)

    monkeypatch.setattr(command.subprocess, "run", hangs)
    with pytest.raises(DeviceError, match="nvidia-smi"):
        command.machine_facts()
    ended = command.subprocess.CompletedProcess([], -11, "", "Segmentation fault")
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(DeviceError, match="Segmentation fault"):
        command.machine_facts()
