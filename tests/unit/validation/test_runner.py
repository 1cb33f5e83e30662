"""No row takes the command or another row down, and the budget goes to the most valuable rows."""

import time
from types import SimpleNamespace

import pytest

from plait.validation import runner
from plait.validation.rows import exit_code
from plait.validation.runner import LAUNCH_PLANNED_SECONDS, Interrupted, Runner, batches
from tests.unit.validation.launches import command, row


def run(rows, *, budget=3600.0):
    return list(Runner(command, budget_seconds=budget).run(rows, {}))


def test_rows_after_one_that_ended_badly():
    """A row that raises, is killed, leaves without a result or hangs has failed; the others passed."""
    rows = [
        row("first"),
        row("raises", "raise"),
        row("dies", "die"),
        row("second"),
        row("leaves", "leave"),
        row("hangs", "hang", least_limit=3),
        row("fails", "fail"),
        row("refuses", "refuse"),
        row("absent", unavailable="one GPU"),
        row("last"),
    ]
    results = run(rows)
    assert [result.name for result in results] == [row.name for row in rows]
    outcomes = {result.name: (result.outcome, result.reason) for result in results}
    passed = {name for name, (outcome, _) in outcomes.items() if outcome == "passed"}
    assert passed == {"first", "second", "last"}
    assert outcomes["raises"][0] == "failed"
    assert "ValueError: a tensor was wrong" in outcomes["raises"][1]
    assert "of no interest" not in outcomes["raises"][1]
    assert outcomes["dies"][0] == "failed" and "exit code -9" in outcomes["dies"][1]
    assert outcomes["leaves"][0] == "failed" and "exit code 0" in outcomes["leaves"][1]
    assert outcomes["hangs"] == ("failed", "ran for more than 3 s and was stopped")
    assert outcomes["fails"] == ("failed", "too large")
    assert outcomes["refuses"] == ("not run", "no links")
    assert outcomes["absent"] == ("not run", "one GPU")
    # Numbers that a row reported before its process died, or before its error, are in its result.
    numbers = {result.name: result.numbers for result in results}
    assert numbers["dies"] == {"rounds": 1} and numbers["fails"]["rounds"] == 1
    assert exit_code(results) == 1


def test_rows_share_a_launch():
    """Rows of as many ranks run in one process, except those that need their own."""
    results = run([row("a"), row("b"), row("c", ranks=2), row("d", own_process=True), row("e")])
    processes = {result.name: result.numbers["process"] for result in results}
    assert processes["a"] == processes["b"] == processes["e"]
    assert len(set(processes.values())) == 3


def test_a_launch_that_does_not_start(monkeypatch):
    """It is stopped without the wait for processes that end by themselves."""
    monkeypatch.setattr(runner, "LAUNCH_LIMIT_SECONDS", 0.3)
    began = time.monotonic()
    (result,) = run([row("stuck", "never")])
    assert result.outcome == "failed" and "did not start" in result.reason
    assert time.monotonic() - began < runner.GRACE_SECONDS


def test_rows_of_low_value_are_left_out():
    """Rows that do not fit are not run, with the numbers; a shorter row after them still fits."""
    budget = LAUNCH_PLANNED_SECONDS + 100
    rows = [row("a", planned=40), row("b", planned=125), row("c", planned=30)]
    results = run(rows, budget=budget)
    assert [result.outcome for result in results] == ["passed", "not run", "passed"]
    assert "planned for 125 s" in results[1].reason and "raise --minutes" in results[1].reason


def test_more_valuable_rows_of_a_later_launch_are_reserved():
    """A row of one rank waits behind a more valuable row of two ranks, although that runs later."""
    rows = [row("a", planned=10), row("two", planned=50, ranks=2), row("b", planned=50)]
    budget = 2 * LAUNCH_PLANNED_SECONDS + 70
    results = {result.name: result for result in run(rows, budget=budget)}
    outcomes = {name: result.outcome for name, result in results.items()}
    assert outcomes == {"a": "passed", "b": "not run", "two": "passed"}
    assert "70 s are reserved" in results["b"].reason


def test_the_end_of_the_budget(monkeypatch):
    """A row that runs when the budget ends is stopped and keeps its numbers."""
    now = [0.0]

    def began(row):
        now[0] = 1000.0 if row.name == "long" else 0.0

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(runner, "time", clock)
    rows = [row("short"), row("long", "hang", planned=500), row("after")]
    results = list(Runner(command, budget_seconds=900, began=began).run(rows, {}))
    assert [result.outcome for result in results] == ["passed", "not run", "not run"]
    assert results[1].reason == "the budget of 15 minutes was used up while it ran"
    assert "0 s of 15 minutes are left" in results[2].reason
    assert exit_code(results) == 0 and exit_code(results[1:]) == 1


def test_an_interruption(monkeypatch):
    """Every row has its result, then the interruption continues."""
    sleep = time.sleep
    calls = []

    def interrupt(seconds):
        calls.append(seconds)
        sleep(seconds)
        if running:
            raise KeyboardInterrupt

    running = []

    def began(row):
        if row.name == "long":
            running.append(row)

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupt))
    rows = [row("done"), row("long", "hang"), row("after")]
    generator = Runner(command, budget_seconds=600, began=began).run(rows, {})
    results = []

    def collect():
        for result in generator:
            running.clear()
            results.append(result)

    with pytest.raises(Interrupted):
        collect()
    assert [(result.outcome, result.reason) for result in results] == [
        ("passed", ""),
        ("not run", "interrupted"),
        ("not run", "interrupted"),
    ]


def test_order_of_launches():
    rows = [row("a"), row("b", ranks=2), row("c", own_process=True), row("d", unavailable="x")]
    names = [[row.name for row in batch] for batch in batches(rows)]
    assert names == [["a", "d"], ["c"], ["b"]]
