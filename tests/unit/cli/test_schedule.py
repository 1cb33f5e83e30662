"""`plait schedule` draws the schedule of a pipeline."""

import json

import pytest

from plait.parallel.schedules.schedule import SCHEDULES
from tests.unit.cli import commands


def run(*arguments):
    return commands.run("schedule", *arguments)


def report(capsys, *arguments):
    """Return the report of `--json`."""
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", SCHEDULES)
def test_lines_in_a_pipe(name, capsys):
    assert run(name, "--pp", "4", "--microbatches", "8") == 0
    printed = capsys.readouterr().out
    first, head, *rows = printed.splitlines()
    assert first.startswith(f"{name}, ") and "bubble" in first and "in flight" in first
    assert head.split() == ["rank", "stages", "idle", "in", "flight"]
    assert [row.split()[0] for row in rows[:4]] == ["0", "1", "2", "3"]
    # No colours.
    assert "\x1b" not in printed


def test_defaults_are_4_ranks_and_8_micro_batches(capsys):
    drawing = report(capsys, "1f1b")
    assert (drawing["pp"], drawing["microbatches"], drawing["total"]) == (4, 8, 33)
    assert drawing["bubble"] == pytest.approx(3 / (8 + 3))
    # (m + p - 1)(F + B). A single micro-batch waits for 2 (p - 1) messages.
    for option, total in (("--pp 2", 27), ("--microbatches 9", 36), ("--microbatches 1", 12)):
        assert report(capsys, "1f1b", *option.split())["total"] == total


def test_stages_and_width(capsys):
    """Many actions are drawn as a letter per column, so that a line has at most 200 columns."""
    assert len(report(capsys, "looped-bfs", "--stages-per-rank", "3")["stage_ranks"]) == 12
    for microbatches in ("8", "64"):
        assert run("1f1b", "--microbatches", microbatches) == 0
        rows = capsys.readouterr().out.splitlines()[2:6]
        assert all(len(row) <= 200 for row in rows)
        assert ("F0 F1" in rows[0]) == (microbatches == "8")


def test_a_narrow_terminal_has_colours_and_a_letter_per_column(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "70")
    assert run("1f1b") == 0
    printed = capsys.readouterr().out
    assert "\x1b[37;44mF\x1b[0m" in printed and "one column: 1 of the step's 33" in printed


def test_list(capsys):
    assert run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(SCHEDULES)
    assert [row["name"] for row in report(capsys, "list")] == list(SCHEDULES)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("interleaved-1f1b --microbatches 11", "use 10 or 12"),
        ("1f1b --microbatches 0", "--microbatches = 0"),
        ("", "NAME"),
    ],
)
def test_mistakes_print_nothing_on_standard_output(line, message, capsys):
    assert run(*line.split()) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""
