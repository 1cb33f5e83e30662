"""`make test` runs two pytest processes; what it prints and returns is that of both."""

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
    """Or has a command of its own."""
    for file in (ROOT / "tests").rglob("test_*.py"):
        assert (
            sum(is_given(file, paths) for paths in (*tests.PARTS.values(), tests.SEPARATE)) == 1
        ), file


def is_given(file, arguments):
    """Whether pytest with these arguments runs `file`."""
    ignored = [
        ROOT / one.removeprefix("--ignore=") for one in arguments if one.startswith("--ignore=")
    ]
    return any(ROOT / one in file.parents for one in arguments) and not any(
        one in file.parents for one in ignored
    )


def test_a_failure_of_any_part_is_one_of_all(tests):
    for first, second, expected in (
        (0, 0, 0), (0, 1, 1), (1, 0, 1), (5, 0, 0), (0, 5, 0), (5, 5, 5), (5, 1, 1), (2, 5, 2), (-9, 0, 1),
    ):  # fmt: skip
        assert tests.exit_code([first, second]) == expected, (first, second)


def test_paths_and_what_needs_a_terminal_are_one_pytest(tests, monkeypatch):
    calls: list[list[str]] = []
    monkeypatch.setattr(tests.subprocess, "call", lambda command, **_: calls.append(command) or 0)
    monkeypatch.setattr(tests, "side_by_side", lambda arguments: 7)
    assert tests.main(["-k", "topology"]) == tests.main(["--durations=50"]) == tests.main([]) == 7
    assert (
        tests.main(["tests/unit/test_covers.py::test_other_rows_are_proof", "-x"])
        == tests.main(["--pdb"])
        == 0
    )
    assert (
        calls[0][-2:] == ["tests/unit/test_covers.py::test_other_rows_are_proof", "-x"]
        and calls[1][-1] == "--pdb"
    )


def test_what_is_left_out_is_said(tests, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (line,) = tests.left_out()
    assert line.startswith(
        "not run here: tests/simulated_device (make simulated), which would skip them: there is no C++ compiler"
    )


def test_lines_of_a_part_bear_its_name(tests, capsys):
    failures: list[str] = []
    program = "print('FAILED a.py::b - c'); print('.FAILED')"
    tests.show(
        "alone",
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True),
        failures,
    )
    assert capsys.readouterr().out == "alone    | FAILED a.py::b - c\nalone    | .FAILED\n"
    assert failures == ["alone    | FAILED a.py::b - c"]


def test_long_cases_are_of_tests_that_are_there():
    """tests/long_cases.txt names cases; one of a function that is gone would leave nothing out."""
    for case in (ROOT / "tests" / "long_cases.txt").read_text(encoding="utf-8").splitlines():
        file, *names = case.split("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert all(name.split("[")[0] in text for name in names), case
