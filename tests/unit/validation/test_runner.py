"""A row ends neither the command nor another row. The budget goes to the most valuable rows."""

import time
from types import SimpleNamespace

import pytest

from plait.validation import runner
from plait.validation.rows import exit_code
from plait.validation.runner import LAUNCH_PLANNED_SECONDS, Interrupted, Runner, batches
from tests.unit.validation.launches import command, row, unavailable_row


def run(rows, *, budget=3600.0, **options):
    return list(Runner(command, budget_seconds=budget, **options).run(rows, {}))


def values(results, attribute):
    return [getattr(result, attribute) for result in results]


def test_other_rows_run_after_one_that_ended_badly():
    rows = [
        row("first"),
        row("raises", "raise"),
        row("dies", "die"),
        row("second"),
        row("leaves", "leave"),
        row("hangs", "hang", least_limit=3),
        row("fails", "fail"),
        row("refuses", "refuse"),
        unavailable_row("absent", "one GPU"),
        row("last"),
    ]
    results = run(rows)
    names = values(rows, "name")
    assert values(results, "name") == names
    outcomes = dict(zip(names, values(results, "outcome"), strict=True))
    assert outcomes == dict.fromkeys(names, "failed") | {
        "first": "passed",
        "second": "passed",
        "last": "passed",
        "refuses": "not run",
        "absent": "not run",
    }

    by_name = dict(zip(names, results, strict=True))
    assert by_name["refuses"].reason == "no links" and by_name["absent"].reason == "one GPU"
    assert "ValueError: a tensor was wrong" in by_name["raises"].reason
    assert "Warning" not in by_name["raises"].reason
    assert "exit code -9" in by_name["dies"].reason
    assert "exit code 0" in by_name["leaves"].reason
    assert by_name["hangs"].reason == "ran for more than 3 s and was stopped"
    assert by_name["fails"].reason == "too large"
    # A result has the numbers that its row reported before its end.
    assert by_name["dies"].numbers == {"rounds": 1} and by_name["fails"].numbers["rounds"] == 1
    assert exit_code(results) == 1


def test_rows_with_as_many_ranks_share_a_launch():
    rows = [row("a"), row("b"), row("c", ranks=2), row("d", own_process=True), row("e")]
    processes = {result.name: result.numbers["process"] for result in run(rows)}
    assert processes["a"] == processes["b"] == processes["e"]
    assert len(set(processes.values())) == 3


def test_a_launch_that_does_not_start_is_stopped_at_once(monkeypatch):
    monkeypatch.setattr(runner, "LAUNCH_LIMIT_SECONDS", 0.3)
    start = time.monotonic()
    (result,) = run([row("stuck", "never")])
    assert result.outcome == "failed" and "did not start" in result.reason
    assert time.monotonic() - start < runner.GRACE_SECONDS


def test_rows_that_do_not_fit_into_the_budget():
    """A shorter row after them still fits."""
    rows = [row("a", planned=40), row("b", planned=125), row("c", planned=30)]
    results = run(rows, budget=LAUNCH_PLANNED_SECONDS + 100)
    assert values(results, "outcome") == ["passed", "not run", "passed"]
    assert "planned for 125 s" in results[1].reason and "raise --minutes" in results[1].reason


def test_time_is_reserved_for_a_more_valuable_later_launch():
    rows = [row("a", planned=10), row("two", planned=50, ranks=2), row("b", planned=50)]
    results = run(rows, budget=2 * LAUNCH_PLANNED_SECONDS + 70)
    outcomes = dict(zip(values(results, "name"), values(results, "outcome"), strict=True))
    assert outcomes == {"a": "passed", "b": "not run", "two": "passed"}
    assert "70 s are reserved" in "".join(values(results, "reason"))


def test_a_row_that_runs_when_the_budget_ends(monkeypatch):
    now = [0.0]

    def began(row):
        now[0] = 1000.0 if row.name == "long" else 0.0

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(runner, "time", clock)
    rows = [row("short"), row("long", "hang", planned=500), row("after")]
    results = run(rows, budget=900, began=began)
    assert values(results, "outcome") == ["passed", "not run", "not run"]
    assert results[1].reason == "the budget of 15 minutes was used up while it ran"
    assert "0 s of 15 minutes are left" in results[2].reason
    assert exit_code(results) == 0 and exit_code(results[1:]) == 1


def test_an_interruption_gives_every_row_a_result(monkeypatch):
    is_interrupted = []

    def sleep(seconds):
        time.sleep(seconds)
        if is_interrupted:
            raise KeyboardInterrupt

    def began(row):
        if row.name == "long":
            is_interrupted.append(True)

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    rows = [row("done"), row("long", "hang"), row("after")]
    results = []

    def collect():
        for result in Runner(command, budget_seconds=600, began=began).run(rows, {}):
            is_interrupted.clear()
            results.append((result.outcome, result.reason))

    with pytest.raises(Interrupted):
        collect()
    assert results == [("passed", ""), ("not run", "interrupted"), ("not run", "interrupted")]


def test_the_order_of_launches():
    rows = [
        row("a"),
        row("b", ranks=2),
        row("c", own_process=True),
        unavailable_row("d", "no reason"),
    ]
    names = [values(batch, "name") for batch in batches(rows)]
    assert names == [["a", "d"], ["c"], ["b"]]
