"""`make test` runs two pytest processes, and prints and returns the results of both."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tests():
    return importlib.import_module("tools.tests")


def test_every_test_is_in_one_part(tests):
    """A test may also have a separate command."""
    for file in (ROOT / "tests").rglob("test_*.py"):
        parts = [*tests.PARTS.values(), tests.SEPARATE]
        assert sum(runs(file, arguments) for arguments in parts) == 1, file


def runs(file, arguments):
    """Return whether pytest with these arguments runs `file`."""
    folders = [folder.as_posix() for folder in file.relative_to(ROOT).parents]
    is_ignored = any(f"--ignore={folder}" in arguments for folder in folders)
    return any(folder in arguments for folder in folders) and not is_ignored


def test_failure_of_a_part_is_a_failure_of_all(tests):
    rows = [
        *((0, 0, 0), (0, 1, 1), (1, 0, 1), (5, 1, 1), (2, 5, 2), (-9, 0, 1)),
        *((5, 0, 0), (0, 5, 0), (5, 5, 5)),  # 5 means that no test was selected
    ]
    for first, second, expected in rows:
        assert tests.exit_code([first, second]) == expected, (first, second)


def test_paths_and_terminal_options_run_a_single_pytest(tests, monkeypatch):
    calls: list[list[str]] = []
    monkeypatch.setattr(tests.subprocess, "call", lambda command, **_: calls.append(command) or 0)
    monkeypatch.setattr(tests, "side_by_side", lambda arguments: 7)
    assert tests.main(["-k", "topology"]) == tests.main(["--durations=50"]) == tests.main([]) == 7
    selection = ["tests/unit/test_covers.py", "-x"]
    assert tests.main(selection) == tests.main(["--pdb"]) == 0
    assert calls[0][-2:] == selection and calls[1][-1] == "--pdb"


def test_tests_that_are_not_run_are_printed(tests, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (line,) = tests.left_out()
    command = "tests/simulated_device (make simulated), which would skip them"
    assert line.startswith(f"not run here: {command}: there is no C++ compiler")


def test_output_lines_start_with_the_name_of_their_part(tests, capsys):
    failures: list[str] = []
    program = "print('FAILED a.py::b - c'); print('.FAILED')"
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    tests.show("alone", process, failures)
    assert capsys.readouterr().out == "alone    | FAILED a.py::b - c\nalone    | .FAILED\n"
    assert failures == ["alone    | FAILED a.py::b - c"]


def test_long_cases_name_tests_that_exist():
    for case in (ROOT / "tests" / "long_cases.txt").read_text(encoding="utf-8").splitlines():
        file, *names = case.split("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert all(name.split("[")[0] in text for name in names), case
