"""Drawings and JSON of a schedule show its timeline."""

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from plait.observe.schedule import schedule_names, timeline_json, timeline_lines, timeline_summary
from plait.parallel.schedules.schedule import SCHEDULES, make_schedule
from plait.parallel.schedules.timeline import even, peak_in_flight, simulate
from tests.unit.parallel.tables import schedules


def timeline_of(name, **options):
    """Return the timeline of a schedule with stages of equal durations."""
    schedule = make_schedule(name, **options)
    return simulate(schedule, even(schedule))


def plain_lines(timeline, width=200):
    return [line.plain for line in timeline_lines(timeline, width=width, coloured=False)]


def test_one_stage_per_rank():
    """A backward is twice as long as a forward, and dots are idle time."""
    timeline = timeline_of("1f1b", pp=2, microbatches=2)
    summary = "1f1b, 2 stages, 2 micro-batches: step 9, bubble 33.3 %, at most 2 in flight"
    assert timeline_summary(timeline) == summary
    assert plain_lines(timeline) == [
        "rank  stages    idle  in flight",
        "   0       0  33.3 %          2  F0 F1 .  .  B0--- .  B1---",
        "   1       1  33.3 %          1  .  F0 B0--- F1 B1--- .  .",
        "F forward, B backward; in flight: micro-batches whose activations the rank holds",
    ]


def test_several_stages_per_rank():
    """The second of two stages has small letters, and more stages have numbers."""
    two = timeline_of("zbv", pp=2, microbatches=1)
    assert plain_lines(two)[1:3] == [
        "   0     0 3  40.0 %          1  F0 .  .  f0 i0 w0 .  .  I0 W0",
        "   1     1 2  40.0 %          1  .  F0 f0 .  .  i0 w0 I0 W0 .",
    ]
    three = plain_lines(timeline_of("looped-bfs", pp=2, microbatches=1, stages_per_rank=3))
    assert "2F0 .   4F0" in three[1] and "0 2 4" in three[1]
    six = plain_lines(timeline_of("looped-bfs", pp=2, microbatches=1, stages_per_rank=6))
    assert "0 2 .. 10" in six[1]


def check_named_actions(body, spans, schedule):
    """Check that every action is named, in the order of the rank."""
    labels = body.replace("-", " ").replace(".", " ").split()
    for label, span in zip(labels, spans, strict=True):
        action = span.action
        if schedule.stages > 2 * schedule.pp:
            assert label == str(action)
        else:
            assert label.upper() == f"{action.kind}{action.microbatch}"
            assert label.islower() == (action.stage >= schedule.pp)


def check_columns(body, spans, schedule, total, idle):
    """Check that every column has the letter of the action in its middle."""
    for column, letter in enumerate(body):
        time = (column + 0.5) * total / len(body)
        expected = idle
        for span in spans:
            if span.start <= time < span.end:
                kind = str(span.action.kind)
                expected = kind.lower() if span.action.stage >= schedule.pp else kind
        assert letter == expected


@hypothesis.given(schedules, st.integers(60, 300), st.booleans())
def test_drawings_show_the_timeline(schedule, width, coloured):
    timeline = simulate(schedule, even(schedule, forward=1.0, input=1.5, weight=0.5))
    head, *lines = timeline_lines(timeline, width=width, coloured=coloured)
    legend = [line.plain for line in lines[schedule.pp :]]
    start = len(head.plain) + 2
    for rank, line in enumerate(lines[: schedule.pp]):
        assert len(line.plain) <= max(width, start + 20)
        columns = line.plain[:start].split()
        assert columns[0] == str(rank)
        assert f"{100 * timeline.bubble(rank):.1f} %" in line.plain[:start]
        assert columns[-1] == f"{peak_in_flight(schedule)[rank]:.4g}"
        assert bool(line.spans) == coloured

        body = line.plain[start:]
        spans = timeline.ranks[rank]
        if len(legend) == 1:
            check_named_actions(body, spans, schedule)
        else:
            assert legend[1].startswith("one column: ")
            check_columns(body, spans, schedule, timeline.total, " " if coloured else ".")


def test_json_has_times_idle_shares_and_activations():
    schedule = make_schedule("1f1b", pp=2, microbatches=1)
    durations = even(schedule, send=0.5)
    report = json.loads(json.dumps(timeline_json(simulate(schedule, durations), durations)))
    assert report["schedule"] == "1f1b" and report["stage_ranks"] == [0, 1]
    assert report["total"] == 7
    passes = {"forward": [1, 1], "input": [1, 1], "weight": [1, 1]}
    assert report["durations"] == {**passes, "send": [0.5]}
    bubble = pytest.approx(4 / 7)
    assert report["bubble"] == bubble == report["ranks"][1]["bubble"]
    actions = [{"action": "0F0", "start": 0, "end": 1}, {"action": "0B0", "start": 5, "end": 7}]
    first = {"stages": [0], "bubble": bubble, "peak_in_flight": 1, "actions": actions}
    assert report["ranks"][0] == first


def test_actions_without_duration_have_no_cell():
    schedule = make_schedule("zbv", pp=1, microbatches=1)
    assert "i0 I0" in plain_lines(simulate(schedule, even(schedule, weight=0)))[1]


def test_every_schedule_is_listed():
    names, stages_per_rank, _ = zip(*schedule_names(), strict=True)
    assert names == tuple(SCHEDULES)
    stages = dict(zip(names, stages_per_rank, strict=True))
    assert (stages["1f1b"], stages["zbv"]) == ("1 per rank", "2 per rank")
    assert stages["interleaved-1f1b"] == "2 or more per rank"
