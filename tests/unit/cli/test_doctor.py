"""`plait doctor` reports the environment, and measures only with an option."""

import json
import platform
from importlib.metadata import version

from tests.table import check_rows
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


WRONG = {
    "--seconds 3": "add --links",
    "--links --seconds 0": "must be between 0.1 and 600",
    "--links --nproc-per-node 1": "one process has no links",
    "--links --nccl": "pass only one of them",
    "--links --out /no/such/folder/x.json": "is not a folder; create it first",
}


def test_wrong_input(capsys):
    def check(row):
        assert run(f"doctor {row[0]}") == 2
        assert row[1] in capsys.readouterr().err

    check_rows({row[0]: row for row in WRONG.items()}, check)
