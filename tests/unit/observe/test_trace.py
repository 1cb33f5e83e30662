"""The trace says what the timeline says: every computation once, none over another, the step's seconds in all."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given

from plait.observe.trace import chrome_trace
from plait.parallel.schedules.schedule import Schedule, make_schedule, messages
from plait.parallel.schedules.timeline import Timeline, even, simulate
from tests.unit.parallel.tables import schedules, unhurried


def timeline_of(schedule: Schedule, **durations: float) -> Timeline:
    """Equal stages."""
    return simulate(schedule, even(schedule, **durations))


def rows_of(trace: dict[str, Any], process: int) -> dict[int, list[dict[str, Any]]]:
    """Complete events of every row, in the order of their start."""
    rows: dict[int, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == process:
            rows.setdefault(event["tid"], []).append(event)
    return {row: sorted(events, key=lambda e: (e["ts"], e["dur"])) for row, events in rows.items()}


@unhurried
@given(schedules)
def test_the_trace_is_the_timeline(schedule: Schedule) -> None:
    """One event a computation at its time; what is idle fills the rest of a rank; every message once, on its pair's row."""
    timeline = timeline_of(schedule, forward=1.0, input=1.5, weight=0.5, send=0.25)
    trace = json.loads(json.dumps(chrome_trace(timeline, title="t", after={"optimizer step": 2.0})))
    ranks, sent = rows_of(trace, 1), rows_of(trace, 2)
    assert sorted(ranks) == list(range(1, schedule.pp + 1)) and not set(ranks) & set(sent)
    for rank, events in enumerate(ranks[row] for row in sorted(ranks)):
        computed = [e for e in events if e["cat"].startswith(("forward", "backward"))]
        assert len(computed) == len(schedule.ranks[rank])
        for event, span in zip(computed, timeline.ranks[rank], strict=True):
            assert event["ts"] == pytest.approx(span.start * 1e6) and event["dur"] == pytest.approx(
                (span.end - span.start) * 1e6
            )
            assert event["args"] == {
                "stage": span.action.stage,
                "micro_batch": span.action.microbatch,
                "seconds": pytest.approx(span.end - span.start),
            }
            kinds = {"F": "forward", "B": "backward", "I": "backward-input", "W": "backward-weight"}
            assert (
                event["cat"] == kinds[span.action.kind]
                and event["name"] == f"{event['cat']} {span.action.microbatch}"
            )
        for first, second in pairwise(events):
            assert first["ts"] + first["dur"] == pytest.approx(
                second["ts"]
            )  # neither a gap nor an overlap
        assert events[0]["ts"] == 0 and [
            e["name"] for e in events if e["cat"] == "rest of the step"
        ] == ["optimizer step"]
        assert sum(e["dur"] for e in events) == pytest.approx((timeline.total + 2) * 1e6)
        idle = sum(e["dur"] for e in events if e["cat"] == "idle")
        assert idle == pytest.approx(timeline.bubble(rank) * timeline.total * 1e6, abs=1e-3)
    assert trace["otherData"]["step_seconds"] == pytest.approx(timeline.total + 2)
    assert trace["otherData"]["pipeline_seconds"] == timeline.total
    named = {
        e["tid"]: e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name" and e["pid"] == 2
    }
    expected = {f"rank {a} to rank {b}": len(found) for (a, b), found in messages(schedule).items()}
    assert {named[row]: len(events) for row, events in sent.items()} == expected
    for events in sent.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(events))
        assert all(e["dur"] == pytest.approx(0.25e6) and e["cat"] == "p2p" for e in events)


def test_rows_have_names() -> None:
    """A rank with its stages, processes for ranks and messages."""
    trace = chrome_trace(timeline_of(make_schedule("zbv", pp=2, microbatches=2)), title="t")
    named = {
        (e["name"], e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["ph"] == "M"
    }
    assert (
        named["process_name", 1, 1] == "pipeline ranks"
        and named["process_name", 2, 3] == "messages"
    )
    assert named["thread_name", 1, 2] == "rank 1 (stages 1, 2)"
    assert trace["otherData"]["schedule"] == "zbv" and trace["otherData"]["title"] == "t"


def test_one_rank_sends_nothing() -> None:
    """A row of micro-batches one after another."""
    trace = chrome_trace(timeline_of(make_schedule("1f1b", pp=1, microbatches=3)), title="t")
    assert [e["name"] for e in rows_of(trace, 1)[1]] == [
        f"{kind} {m}" for m in range(3) for kind in ("forward", "backward")
    ]
    assert rows_of(trace, 2) == {}
