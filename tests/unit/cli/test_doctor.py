"""`plait doctor` alone says what the environment has; measuring is asked for."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version

import pytest

from plait.cli.main import main


def run(*arguments: str) -> int:
    """The command's exit code."""
    try:
        return int(main(["doctor", *arguments]) or 0)
    except SystemExit as end:
        return int(end.code or 0)


def test_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert run("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["versions"]["torch"] == version("torch")
        and found["versions"]["python"] == platform.python_version()
    )
    assert found["machine"]["cores"] >= 1 and found["variables"]["NCCL_DEBUG"] == "INFO"
    assert run() == 0
    shown = capsys.readouterr().out
    assert version("torch") in shown and "NCCL_DEBUG" in shown


def test_nccl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert run("--nccl", "--json") == 0
    assert json.loads(capsys.readouterr().out)["variables"]["NCCL_ALGO"] == "Ring"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seconds", "3"), "add --links"),
        (("--links", "--seconds", "0"), "not between 0.1 and 600"),
        (("--links", "--nproc-per-node", "1"), "one process has no links"),
        (("--links", "--nccl"), "one of them at a time"),
        (("--links", "--out", "/no/such/folder/x.json"), "there is no folder"),
    ],
)
def test_wrong_input(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert said in capsys.readouterr().err
