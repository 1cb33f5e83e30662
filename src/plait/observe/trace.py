"""Chrome trace of a pipeline's timeline, for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is described in
docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. There is one row per
pipeline rank, and one per pair of ranks that exchange messages. All events are complete events
(`X`) with times in microseconds.
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
"""Names of the palette of chrome://tracing. Perfetto ignores them."""
# Perfetto takes process 0 and thread 0 for the idle system, so both are numbered from 1. The number
# of a thread should be unique across processes.
_RANKS_PROCESS = 1
_MESSAGES_PROCESS = 2
_MICROSECONDS = 1e6


def chrome_trace(
    timeline: Timeline, *, title: str, after: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Return a Chrome trace for `json.dumps`.

    Args:
        timeline: The timeline, whose times are seconds.
        title: Title of the trace.
        after: Seconds of a step outside of the pipeline, keyed by their meaning. They are drawn on
            every rank after the end of the pipeline, because their actual position in the step is
            not predicted.
    """
    schedule = timeline.schedule
    after = dict(after or {})
    events = [
        _metadata("process_name", _RANKS_PROCESS, 1, "pipeline ranks"),
        _metadata("process_name", _MESSAGES_PROCESS, schedule.pp + 1, "messages"),
    ]
    for rank, spans in enumerate(timeline.ranks):
        stages = ", ".join(str(stage) for stage in schedule.stages_of(rank))
        thread = rank + 1
        label = f"rank {rank} (stages {stages})"
        events.append(_metadata("thread_name", _RANKS_PROCESS, thread, label))
        events += _rank_events(thread, spans, timeline.total)
        start = timeline.total
        for meaning, seconds in after.items():
            events.append(_event(meaning, "rest of the step", thread, start, start + seconds))
            start += seconds

    pairs = sorted({(transfer.source, transfer.destination) for transfer in timeline.transfers})
    threads = {pair: schedule.pp + 1 + index for index, pair in enumerate(pairs)}
    for (source, destination), thread in threads.items():
        label = f"rank {source} to rank {destination}"
        events.append(_metadata("thread_name", _MESSAGES_PROCESS, thread, label))
    for transfer in timeline.transfers:
        events.append(_transfer_event(transfer, threads[transfer.source, transfer.destination]))

    description = {
        "title": title,
        "schedule": schedule.name,
        "pipeline_seconds": timeline.total,
        "step_seconds": timeline.total + sum(after.values()),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": description}


def _rank_events(thread: int, spans: Sequence[Span], total: float) -> list[dict[str, Any]]:
    events = []
    idle_since = 0.0
    for span in spans:
        if span.start > idle_since:
            events.append(_event("idle", "idle", thread, idle_since, span.start, colour="grey"))
        action = span.action
        name = _NAMES[action.kind]
        events.append(
            _event(
                f"{name} {action.microbatch}",
                name,
                thread,
                span.start,
                span.end,
                args={"stage": action.stage, "micro_batch": action.microbatch},
                colour=_COLOURS[action.kind],
            )
        )
        idle_since = span.end
    if total > idle_since:
        events.append(_event("idle", "idle", thread, idle_since, total, colour="grey"))
    return events


def _transfer_event(transfer: Transfer, thread: int) -> dict[str, Any]:
    message = transfer.message
    return _event(
        f"{message.payload} {message.microbatch}",
        "p2p",
        thread,
        transfer.start,
        transfer.end,
        process=_MESSAGES_PROCESS,
        args={"stage": message.stage, "micro_batch": message.microbatch},
    )


def _event(
    name: str,
    category: str,
    thread: int,
    start: float,
    end: float,
    *,
    process: int = _RANKS_PROCESS,
    args: Mapping[str, Any] | None = None,
    colour: str = "",
) -> dict[str, Any]:
    event: dict[str, Any] = {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": start * _MICROSECONDS,
        "dur": (end - start) * _MICROSECONDS,
        "args": {**(args or {}), "seconds": end - start},
    }
    if colour:
        event["cname"] = colour
    return event


def _metadata(field: str, process: int, thread: int, name: str) -> dict[str, Any]:
    """Return the event that names a process or a thread."""
    return {"name": field, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
