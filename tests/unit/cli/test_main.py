"""`plait` lists its commands quickly, and turns errors into messages and exit codes."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer

from plait.cli import main as command
from plait.errors import CheckpointError, ConfigError, Problem
from tests.unit.cli.commands import run


def test_help_lists_all_commands_and_imports_no_torch():
    """Modules of the commands do not import torch, nor do schedules that Plait makes."""
    modules = []
    for target, _ in command.COMMANDS.values():
        if "config" not in target:
            modules.append(target.partition(":")[0])
    code = f"""
import importlib, sys
from plait.cli.main import main
for arguments in (["--help"], ["schedule", "1f1b", "--json"]):
    try: main(arguments)
    except SystemExit as end: print(end.code, "torch" in sys.modules, "transformers" in sys.modules)
for name in {modules}: importlib.import_module(name)
print("torch" in sys.modules)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    for verb, (_, line) in command.COMMANDS.items():
        assert verb in process.stdout
        assert line.split(",")[0][:30] in process.stdout
    lines = process.stdout.splitlines()
    assert lines.count("0 False False") == 2 and lines[-1] == "False"


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("trian", "train"),
        ("--nope", "--nope"),
        ("launch --nproc-per-nod 2 x.py", "--nproc-per-node"),
    ],
)
def test_typos_get_a_similar_name(line, suggestion, capsys):
    assert run(line) == 2
    assert suggestion in capsys.readouterr().err


def test_closed_standard_streams(monkeypatch):
    """`plait chat` must see the end of its input, and output must not fail."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert run("--version") == 0
    assert sys.stdin.readline() == ""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()


def test_every_module_is_a_command():
    shared = ("__init__", "main", "options", "terminal")
    modules = set()
    for file in Path(command.__file__).parent.glob("*.py"):
        if file.stem not in shared:
            modules.add(f"plait.cli.{file.stem}")
    assert modules == {target.partition(":")[0] for target, _ in command.COMMANDS.values()}


@pytest.fixture
def fail(monkeypatch):
    """Return a function that runs `plait launch` with an error inside, and returns the code."""
    app = typer.Typer()
    errors = []

    @app.command()
    def raise_error():
        raise errors[-1]

    module = types.ModuleType("plait_test_command")
    module.app = app
    monkeypatch.setitem(sys.modules, "plait_test_command", module)
    monkeypatch.setitem(command.COMMANDS, "launch", ("plait_test_command:app", "Fails."))

    def run_with(error):
        errors.append(error)
        return run("launch")

    return run_with


PROBLEMS = ConfigError(Problem("a", 1, "r", "m"), Problem("b", None, "s", "n"))


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (PROBLEMS, 2, "plait: a = 1: r; m\nplait: b: s; n\n"),
        (CheckpointError("gone"), 4, "plait: gone\n"),
    ],
)
def test_errors_of_plait_have_no_traceback(fail, capsys, error, code, text):
    assert fail(error) == code
    assert capsys.readouterr().err == text


def test_ctrl_c_has_the_exit_code_of_a_shell(fail):
    assert fail(KeyboardInterrupt()) == 130


def test_a_defect_keeps_its_traceback(fail):
    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError("a defect"))


@pytest.mark.parametrize("verb", [*command.COMMANDS, "config explain", "config schema"])
def test_help_fits_on_a_screen(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run(f"{verb} --help") == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert f"Usage: plait {verb}" in "".join(lines)
    # Options without a value show no type.
    assert not any("<bool>" in line for line in lines)
    assert len(lines) <= 40
    if verb == "layout":
        # A default in words is not read as markup.
        assert "(default:" in "".join(lines)
