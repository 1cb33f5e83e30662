"""No row takes the command or another row down."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from plait.validation import runner
from plait.validation.rows import Result, Row, exit_code
from plait.validation.runner import Interrupted, Runner, batched
from tests.unit.validation.launches import command, row


def run(rows: list[Row], *, budget: float = 60.0) -> list[Result]:
    found = list(Runner(command, budget_seconds=budget).run(rows, {}))
    assert [one.name for one in found] == [one.name for one in rows]
    return found


def test_rows_after_one_that_ended_badly() -> None:
    """A row that raises, is killed, leaves without a result or hangs has failed with the reason; the others passed."""
    rows = [
        row("first"),
        row("raises", "raise"),
        row("dies", "die"),
        row("second"),
        row("leaves", "leave"),
        row("hangs", "hang", seconds=0.3),
    ]
    found = run([*rows, row("fails", "fail"), row("refuses", "refuse"), row("absent", without="one GPU"), row("last")])
    outcomes = {one.name: (one.outcome, one.reason) for one in found}
    assert {name for name, (outcome, _) in outcomes.items() if outcome == "passed"} == {"first", "second", "last"}
    assert "ValueError: a tensor was wrong" in outcomes["raises"][1] and outcomes["raises"][0] == "failed"
    assert "of no interest" not in outcomes["raises"][1]
    assert outcomes["dies"][0] == "failed" and "exit code -9" in outcomes["dies"][1]
    assert outcomes["leaves"][0] == "failed" and "exit code 0" in outcomes["leaves"][1]
    assert outcomes["hangs"] == ("failed", "ran for more than 0 s and was ended")
    assert outcomes["fails"] == ("failed", "too large")
    assert outcomes["refuses"] == ("not run", "no links") and outcomes["absent"] == ("not run", "one GPU")
    assert exit_code(found) == 1


def test_a_launch_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "START_SECONDS", 0.3)
    (stuck,) = run([row("stuck", "never")])
    assert stuck.outcome == "failed" and "did not start" in stuck.reason


def test_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no time left is not run; it never counts as passed. By a clock that jumps to the end while the second row runs."""
    now = [0.0]

    def began(row: Row) -> None:
        now[0] = 1000.0 if row.name == "long" else 0.0

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    rows = [row("done"), row("long", "hang", apart=True, seconds=2000), row("after")]
    found = list(Runner(command, budget_seconds=900, began=began).run(rows, {}))
    assert [one.outcome for one in found] == ["passed", "not run", "not run"]
    assert found[1].reason == "the budget of 15 minutes was used up while it ran" and found[2].reason.endswith("minutes was used up")
    assert exit_code(found) == 0 and exit_code(found[1:]) == 1  # nothing passed


def test_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row has its result, then the interruption goes on."""
    sleep, calls = runner.time.sleep, []

    def interrupted(seconds: float) -> None:
        calls.append(seconds)
        if len(calls) == 10:
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr(runner.time, "sleep", interrupted)
    found: list[Result] = []

    def collect() -> None:
        for result in Runner(command, budget_seconds=60).run([row("done"), row("long", "hang"), row("after")], {}):
            found.append(result)  # noqa: PERF402, what came before the end is to be kept

    with pytest.raises(Interrupted):
        collect()
    assert [(one.outcome, one.reason) for one in found] == [("passed", ""), ("not run", "interrupted"), ("not run", "interrupted")]


def test_what_shares_a_launch() -> None:
    rows = [row("a"), row("b"), row("c", ranks=2), row("d", ranks=2, apart=True), row("e", ranks=2), row("f", ranks=2, without="x")]
    assert [[one.name for one in batch] for batch in batched(rows)] == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    assert len(batched([row(str(index)) for index in range(runner.MOST_ROWS + 1)])) == 2
