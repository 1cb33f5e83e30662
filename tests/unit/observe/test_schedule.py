"""The drawings say what the timeline says."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.observe.schedule import schedule_names, timeline_json, timeline_lines, timeline_summary
from plait.parallel.schedules.schedule import SCHEDULES, make_schedule
from plait.parallel.schedules.timeline import even, peak_in_flight, simulate
from tests.unit.parallel.tables import schedules


def timeline_of(schedule, **durations):
    """Equal stages."""
    return simulate(schedule, even(schedule, **durations))


def plain(timeline, width=200):
    """As in a pipe."""
    return [line.plain for line in timeline_lines(timeline, width=width, coloured=False)]


def test_one_stage_a_rank():
    """Names of kind and micro-batch; a backward is twice as long as a forward; dots where a rank is idle."""
    timeline = timeline_of(make_schedule("1f1b", pp=2, microbatches=2))
    summary = "1f1b, 2 stages, 2 micro-batches: step 9, bubble 33.3 %, at most 2 in flight"
    assert timeline_summary(timeline) == summary
    assert plain(timeline) == [
        "rank  stages    idle  in flight",
        "   0       0  33.3 %          2  F0 F1 .  .  B0--- .  B1---",
        "   1       1  33.3 %          1  .  F0 B0--- F1 B1--- .  .",
        "F forward, B backward; in flight: micro-batches whose activations the rank holds",
    ]


def test_two_and_more_stages_a_rank():
    """Small letters for the second stage of two, numbers for more."""
    two = timeline_of(make_schedule("zbv", pp=2, microbatches=1))
    assert plain(two)[1:3] == [
        "   0     0 3  40.0 %          1  F0 .  .  f0 i0 w0 .  .  I0 W0",
        "   1     1 2  40.0 %          1  .  F0 f0 .  .  i0 w0 I0 W0 .",
    ]
    three = timeline_of(make_schedule("looped-bfs", pp=2, microbatches=1, stages_per_rank=3))
    assert "2F0 .   4F0" in plain(three)[1] and "0 2 4" in plain(three)[1]
    many = timeline_of(make_schedule("looped-bfs", pp=2, microbatches=1, stages_per_rank=6))
    assert "0 2 .. 10" in plain(many)[1]


@given(schedules, st.integers(60, 300), st.booleans())
def test_the_drawing_is_the_timeline(schedule, width, coloured):
    """Every action is named in its rank's order; or every column is the letter of what runs in its middle. Never wider than asked."""
    timeline = timeline_of(schedule, forward=1.0, input=1.5, weight=0.5)
    head, *drawn = timeline_lines(timeline, width=width, coloured=coloured)
    rows, legend = drawn[: schedule.pp], [line.plain for line in drawn[schedule.pp :]]
    start = len(head.plain) + 2
    for rank, line in enumerate(rows):
        spans = timeline.ranks[rank]
        left, body = line.plain[:start], line.plain[start:]
        assert len(line.plain) <= max(width, start + 20)
        assert left.split()[0] == str(rank) and f"{100 * timeline.bubble(rank):.1f} %" in left
        assert left.split()[-1] == f"{peak_in_flight(schedule)[rank]:.4g}"
        if len(legend) == 1:
            shown = body.replace("-", " ").replace(".", " ").split()
            if schedule.stages > 2 * schedule.pp:
                assert shown == [str(span.action) for span in spans]
            else:
                actions = [span.action for span in spans]
                names = [f"{action.kind}{action.microbatch}" for action in actions]
                assert [word.upper() for word in shown] == names
                is_second = [action.stage >= schedule.pp for action in actions]
                assert [word.islower() for word in shown] == is_second
        else:
            assert legend[1].startswith("one column: ")
            for column, letter in enumerate(body):
                time = (column + 0.5) * timeline.total / len(body)
                running = [span.action for span in spans if span.start <= time < span.end]
                expected = " " if coloured else "."
                if running:
                    kind = running[0].kind
                    expected = str(kind).lower() if running[0].stage >= schedule.pp else kind
                assert letter == expected
        assert bool(line.spans) == coloured


def test_json_says_everything():
    """The report survives `json` and has times, idle parts and activations."""
    schedule = make_schedule("1f1b", pp=2, microbatches=1)
    durations = even(schedule, send=0.5)
    found = json.loads(json.dumps(timeline_json(simulate(schedule, durations), durations)))
    assert found["schedule"] == "1f1b" and found["stage_ranks"] == [0, 1] and found["total"] == 7
    passes = {name: [1, 1] for name in ("forward", "input", "weight")}
    assert found["durations"] == {**passes, "send": [0.5]}
    bubble = pytest.approx(4 / 7)
    assert found["bubble"] == bubble == found["ranks"][1]["bubble"]
    actions = [{"action": "0F0", "start": 0, "end": 1}, {"action": "0B0", "start": 5, "end": 7}]
    first = {"stages": [0], "bubble": bubble, "peak_in_flight": 1, "actions": actions}
    assert found["ranks"][0] == first


def test_actions_without_duration_are_left_out():
    """A weight gradient that takes nothing has no cell; the others keep theirs."""
    assert "i0 I0" in plain(timeline_of(make_schedule("zbv", pp=1, microbatches=1), weight=0))[1]


def test_names():
    """The list has one line per schedule."""
    assert [name for name, _, _ in schedule_names()] == list(SCHEDULES)
    stages = {name: stages for name, stages, _ in schedule_names()}
    assert (stages["1f1b"], stages["zbv"]) == ("1 per rank", "2 per rank")
    assert stages["interleaved-1f1b"] == "2 or more per rank"
