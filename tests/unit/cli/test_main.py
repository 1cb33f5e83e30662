from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from plait.cli import main as command
from plait.errors import CheckpointError, ConfigError, Problem


def _exit(arguments):
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    return caught.value.code


def test_help_names_every_verb_and_imports_no_torch():
    """Neither the modules of the verbs, nor the schedules that torch does not generate, import it."""
    targets = [target for target, _ in command.COMMANDS.values()]
    modules = [target.partition(":")[0] for target in targets if "config" not in target]
    code = f"""
import importlib, sys
from plait.cli.main import main
for arguments in (["--help"], ["schedule", "1f1b", "--json"]):
    try: main(arguments)
    except SystemExit as end: print(end.code, "torch" in sys.modules, "transformers" in sys.modules)
for name in {modules}: importlib.import_module(name)
print("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    for verb, (_, line) in command.COMMANDS.items():
        assert verb in done.stdout
        assert line.split(",")[0][:30] in done.stdout
    lines = done.stdout.splitlines()
    assert lines.count("0 False False") == 2 and lines[-1] == "False"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("trian", "train"),
        ("--nope", "--nope"),
        ("launch --nproc-per-nod 2 x.py", "--nproc-per-node"),
    ],
)
def test_typing_errors_name_the_nearest(arguments, words, capsys):
    assert _exit(arguments.split()) == 2
    assert words in capsys.readouterr().err


def test_closed_standard_streams(monkeypatch):
    """A chat finds the end of its input, and the command ends well without a place for output."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert _exit(["--version"]) == 0
    assert sys.stdin.readline() == ""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()


def test_no_verb_is_left_out():
    files = Path(command.__file__).parent.glob("*.py")
    shared = ("__init__", "main", "options", "terminal")
    modules = {f"plait.cli.{file.stem}" for file in files if file.stem not in shared}
    assert modules == {target.partition(":")[0] for target, _ in command.COMMANDS.values()}


class TestErrors:
    @pytest.fixture
    def failing(self, monkeypatch, tmp_path):
        raised: dict[str, Exception] = {}
        app = typer.Typer()

        @app.command()
        def fail():
            raise raised["it"]

        module = type(sys)("plait_test_verb")
        module.app = app  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "plait_test_verb", module)
        monkeypatch.setitem(command.COMMANDS, "launch", ("plait_test_verb:app", "Fails."))
        return raised

    @pytest.mark.parametrize(
        ("error", "code", "text"),
        [
            (ConfigError(Problem("a", 1, "r", "m"), Problem("b", None, "s", "n")), 2, "plait: a = 1: r; m\nplait: b: s; n\n"),
            (CheckpointError("gone"), 4, "plait: gone\n"),
        ],
    )  # fmt: skip
    def test_a_plait_error_is_told_without_a_traceback(self, failing, capsys, error, code, text):
        failing["it"] = error
        assert _exit(["launch"]) == code
        assert capsys.readouterr().err == text

    def test_a_defect_keeps_its_traceback(self, failing):
        failing["it"] = ZeroDivisionError("a defect")
        with pytest.raises(ZeroDivisionError):
            command.main(["launch"])

    def test_ctrl_c(self, failing):
        failing["it"] = KeyboardInterrupt()  # type: ignore[assignment]
        assert _exit(["launch"]) == 130


@pytest.mark.parametrize("verb", [*command.COMMANDS, "config explain", "config schema"])
def test_help_is_a_screen(verb, capsys, monkeypatch):
    """At 100 columns, 40 lines; and a default that is told in words is not taken for markup."""
    monkeypatch.setenv("COLUMNS", "100")
    assert _exit([*verb.split(), "--help"]) == 0
    shown = capsys.readouterr().out.strip().splitlines()
    assert f"Usage: plait {verb}" in "".join(shown)
    assert not any("<bool>" in line for line in shown), "an option without a value shows a type"
    assert len(shown) <= 40, f"{len(shown)} lines"
    if verb == "layout":
        assert "(default:" in "".join(shown)
