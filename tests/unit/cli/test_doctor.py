"""`plait doctor` reports the environment, and measures only with an option."""

import json
import platform
from importlib.metadata import version

from tests.unit.cli.commands import run


def test_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert run("doctor --json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == version("torch")
    assert report["versions"]["python"] == platform.python_version()
    assert report["machine"]["cores"] >= 1 and report["variables"]["NCCL_DEBUG"] == "INFO"
    assert run("doctor") == 0
    printed = capsys.readouterr().out
    assert version("torch") in printed and "NCCL_DEBUG" in printed
    assert run("doctor --nccl --json") == 0
    assert json.loads(capsys.readouterr().out)["variables"]["NCCL_DEBUG"] == "INFO"


def test_incomplete_launcher_variables_are_reported(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert run("doctor --json") == 0
    launcher = json.loads(capsys.readouterr().out)["launcher"]
    assert launcher["problem"].startswith("WORLD_SIZE: not set although RANK is")
