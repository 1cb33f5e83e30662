"""`plait schedule` as a user runs it."""

import json

import pytest

from plait.parallel.schedules.schedule import SCHEDULES
from tests.table import check_rows
from tests.unit.cli import commands


def run(*arguments):
    return commands.run("schedule", *arguments)


def report(capsys, *arguments):
    """What `--json` prints."""
    assert run(*arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_lines_in_a_pipe(name, capsys):
    """A heading, a line a rank, a legend; no colour, no box."""
    assert run(name, "--pp", "4", "--microbatches", "8") == 0
    shown = capsys.readouterr().out
    first, head, *rows = shown.splitlines()
    assert first.startswith(f"{name}, ") and "bubble" in first and "in flight" in first
    assert head.split() == ["rank", "stages", "idle", "in", "flight"]
    assert [row.split()[0] for row in rows[:4]] == ["0", "1", "2", "3"]
    assert "\x1b" not in shown


def test_defaults_are_4_ranks_and_8_micro_batches(capsys):
    """The bubble of 1F1B: 3/(8 + 3)."""
    found = report(capsys, "1f1b")
    assert (found["pp"], found["microbatches"], found["total"]) == (4, 8, 33)
    assert found["bubble"] == pytest.approx(3 / 11)
    # (m + p - 1)(F + B), and with one micro-batch 2 (p - 1) messages more.
    for option, total in (("--pp 2", 27), ("--microbatches 9", 36), ("--microbatches 1", 12)):
        assert report(capsys, "1f1b", *option.split())["total"] == total


def test_stages_and_width(capsys):
    """Several stages per rank; at most 200 columns in a pipe, and a letter per column if there are too many actions."""
    assert len(report(capsys, "looped-bfs", "--stages-per-rank", "3")["stage_ranks"]) == 12  # type: ignore[arg-type]
    for microbatches in ("8", "64"):
        assert run("1f1b", "--microbatches", microbatches) == 0
        rows = capsys.readouterr().out.splitlines()[2:6]
        assert all(len(row) <= 200 for row in rows)
        assert ("F0 F1" in rows[0]) == (microbatches == "8")


def test_colours_on_a_terminal(capsys, monkeypatch):
    """As wide as the terminal; a narrow one gets a letter a column."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "70")
    assert run("1f1b") == 0
    shown = capsys.readouterr().out
    assert "\x1b[37;44mF\x1b[0m" in shown and "one column: 1 of the step's 33" in shown


@pytest.mark.parametrize("as_json", [False, True])
def test_list(as_json, capsys):
    """The names, one line each."""
    assert run("list", *(["--json"] if as_json else [])) == 0
    shown = capsys.readouterr().out
    if as_json:
        assert [row["name"] for row in json.loads(shown)] == list(SCHEDULES)
    else:
        assert [line.split()[0] for line in shown.splitlines()] == list(SCHEDULES)


WRONG = {
    "1F1B": "did you mean `1f1b`?",
    "interleaved-1f1b --microbatches 11": "use 10 or 12",
    "dualpipev --microbatches 7": "has 8 stages and needs as many micro-batches",
    "1f1b --stages-per-rank 2": "1f1b has exactly 1 on a rank",
    "1f1b --pp 0": "--pp = 0",
    "1f1b --microbatches 0": "--microbatches = 0",
    "": "NAME",
}


def test_wrong_input(capsys):
    """A message, exit code 2, nothing on standard output."""

    def check(row):
        assert run(*row[0].split()) == 2
        shown = capsys.readouterr()
        assert row[1] in shown.err and shown.out == ""

    check_rows({row[0]: row for row in WRONG.items()}, check)
