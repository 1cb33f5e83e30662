"""A pipeline's timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing
open.

Trace Event Format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. A row a
pipeline rank, and a row for each pair of ranks that pass messages. Complete events (`X`), times in
microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plait.parallel.schedules.actions import Kind
from plait.parallel.schedules.timeline import Span, Timeline, Transfer

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward-input",
    Kind.WEIGHT: "backward-weight",
}
_COLOURS = {
    Kind.FORWARD: "thread_state_running",
    Kind.BACKWARD: "thread_state_iowait",
    Kind.INPUT: "rail_animation",
    Kind.WEIGHT: "rail_load",
}
"""Names of chrome://tracing's palette; Perfetto has its own colours."""
_RANKS = 1
_MESSAGES = 2
"""Processes of the trace. Perfetto takes 0, of processes and of threads, for the idle system, and a
thread's number should be unique.
"""
_MICROSECONDS = 1e6


def chrome_trace(
    timeline: Timeline, *, title: str, after: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """For `json.dumps`. Times of the timeline are taken as seconds.

    `after` has seconds of what a step takes beyond the pipeline, by meaning: drawn on every rank
    behind the pipeline's end, one after the other, for where in the step they fall is not
    predicted.
    """
    schedule = timeline.schedule
    after = dict(after or {})
    events = [
        _named("process_name", _RANKS, 1, "pipeline ranks"),
        _named("process_name", _MESSAGES, schedule.pp + 1, "messages"),
    ]
    for rank, row in enumerate(timeline.ranks):
        stages = ", ".join(str(stage) for stage in schedule.stages_of(rank))
        thread = rank + 1
        events.append(_named("thread_name", _RANKS, thread, f"rank {rank} (stages {stages})"))
        events += _rank_events(thread, row, timeline.total)
        start = timeline.total
        for meaning, seconds in after.items():
            events.append(
                _event(meaning, "rest of the step", _RANKS, thread, start, start + seconds, {})
            )
            start += seconds
    pairs = sorted({(sent.source, sent.destination) for sent in timeline.transfers})
    rows = {pair: schedule.pp + 1 + index for index, pair in enumerate(pairs)}
    events += [
        _named("thread_name", _MESSAGES, row, f"rank {source} to rank {to}")
        for (source, to), row in rows.items()
    ]
    events += [_sent(sent, rows[sent.source, sent.destination]) for sent in timeline.transfers]
    total = timeline.total + sum(after.values())
    said = {
        "title": title,
        "schedule": schedule.name,
        "pipeline_seconds": timeline.total,
        "step_seconds": total,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": said}


def _rank_events(thread: int, row: Sequence[Span], total: float) -> list[dict[str, Any]]:
    events = []
    free = 0.0
    for span in row:
        if span.start > free:
            events.append(_event("idle", "idle", _RANKS, thread, free, span.start, {}, "grey"))
        action = span.action
        name = _NAMES[action.kind]
        args = {"stage": action.stage, "micro_batch": action.microbatch}
        events.append(
            _event(
                f"{name} {action.microbatch}",
                name,
                _RANKS,
                thread,
                span.start,
                span.end,
                args,
                _COLOURS[action.kind],
            )
        )
        free = span.end
    if total > free:
        events.append(_event("idle", "idle", _RANKS, thread, free, total, {}, "grey"))
    return events


def _sent(sent: Transfer, thread: int) -> dict[str, Any]:
    args = {"stage": sent.message.stage, "micro_batch": sent.message.microbatch}
    return _event(
        f"{sent.message.payload} {sent.message.microbatch}",
        "p2p",
        _MESSAGES,
        thread,
        sent.start,
        sent.end,
        args,
    )


def _event(
    name: str,
    category: str,
    process: int,
    thread: int,
    start: float,
    end: float,
    args: dict[str, Any],
    colour: str = "",
) -> dict[str, Any]:
    event = {"name": name, "cat": category, "ph": "X", "pid": process, "tid": thread}
    event |= {
        "ts": start * _MICROSECONDS,
        "dur": (end - start) * _MICROSECONDS,
        "args": args | {"seconds": end - start},
    }
    return event | ({"cname": colour} if colour else {})


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
