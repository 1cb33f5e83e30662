"""The drawings say what the timeline says."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import InputError
from plait.observe.schedule import (
    schedule_names,
    timeline_json,
    timeline_lines,
    timeline_summary,
    timeline_svg,
)
from plait.parallel.schedules.schedule import SCHEDULES, Schedule, make_schedule
from plait.parallel.schedules.timeline import Timeline, even, peak_in_flight, simulate
from tests.unit.parallel.tables import schedules, unhurried

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(schedule: Schedule, **durations: float) -> Timeline:
    """Equal stages."""
    return simulate(schedule, even(schedule, **durations))


def plain(timeline: Timeline, width: int = 200) -> list[str]:
    """As in a pipe."""
    return [line.plain for line in timeline_lines(timeline, width=width, coloured=False)]


def test_one_stage_a_rank() -> None:
    """Names of kind and micro-batch; a backward is twice as long as a forward; dots where a rank is idle."""
    timeline = timeline_of(make_schedule("1f1b", pp=2, microbatches=2))
    assert (
        timeline_summary(timeline)
        == "1f1b, 2 stages, 2 micro-batches: step 9, bubble 33.3 %, at most 2 in flight"
    )
    assert plain(timeline) == [
        "rank  stages    idle  in flight",
        "   0       0  33.3 %          2  F0 F1 .  .  B0--- .  B1---",
        "   1       1  33.3 %          1  .  F0 B0--- F1 B1--- .  .",
        "F forward, B backward; in flight: micro-batches whose activations the rank holds",
    ]


def test_two_and_more_stages_a_rank() -> None:
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


@unhurried
@given(schedules, st.integers(60, 300), st.booleans())
def test_the_drawing_is_the_timeline(schedule: Schedule, width: int, coloured: bool) -> None:
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
                assert [word.upper() for word in shown] == [
                    f"{span.action.kind}{span.action.microbatch}" for span in spans
                ]
                assert [word.islower() for word in shown] == [
                    span.action.stage >= schedule.pp for span in spans
                ]
        else:
            assert legend[1].startswith("one column: ")
            for column, letter in enumerate(body):
                time = (column + 0.5) * timeline.total / len(body)
                running = [span.action for span in spans if span.start <= time < span.end]
                if running:
                    assert letter == (
                        str(running[0].kind).lower()
                        if running[0].stage >= schedule.pp
                        else running[0].kind
                    )
                else:
                    assert letter == (" " if coloured else ".")
        assert bool(line.spans) == coloured


@unhurried
@given(schedules)
def test_svg(schedule: Schedule) -> None:
    """One rectangle an action at its time, none over another, inside the picture; a tooltip; what is idle and held."""
    timeline = timeline_of(schedule, send=0.25)
    root = ElementTree.fromstring(timeline_svg(timeline))
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    actions = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "action"]
    spans = [(rank, span) for rank, row in enumerate(timeline.ranks) for span in row]
    assert len(actions) == len(spans)
    scale = 1200 / timeline.total
    ends: dict[float, float] = {}
    for rect, (_, span) in zip(actions, spans, strict=True):
        x, y, wide, high = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert wide == pytest.approx((span.end - span.start) * scale, abs=0.001)
        assert x - 96 == pytest.approx(span.start * scale, abs=0.001)
        assert x >= ends.get(y, 0) - 0.01 and x + wide <= width and y + high <= height
        ends[y] = x + wide
        tip = rect.findtext(f"{SVG}title")
        assert tip is not None and tip.startswith(f"{span.action}: ")
    assert len(ends) == schedule.pp
    text = [element.text for element in root.iter(f"{SVG}text")]
    assert timeline_summary(timeline) in text
    for rank in range(schedule.pp):
        assert f"rank {rank}" in text
        assert (
            f"idle {100 * timeline.bubble(rank):.1f} %, {peak_in_flight(schedule)[rank]:.4g} in flight"
            in text
        )


def test_a_window_draws_what_runs_in_it() -> None:
    """Cut at its ends, on its own axis, with units."""
    timeline = timeline_of(make_schedule("1f1b", pp=2, microbatches=8))
    root = ElementTree.fromstring(timeline_svg(timeline, window=(4.0, 10.0), unit=" s"))
    actions = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "action"]
    inside = [span for row in timeline.ranks for span in row if span.end > 4 and span.start < 10]
    assert len(actions) == len(inside) < 32
    for rect, span in zip(actions, inside, strict=True):
        assert float(rect.attrib["x"]) - 96 == pytest.approx(
            (max(span.start, 4) - 4) * 200, abs=0.001
        )
        assert float(rect.attrib["width"]) == pytest.approx(
            (min(span.end, 10) - max(span.start, 4)) * 200, abs=0.001
        )
        assert (rect.findtext(f"{SVG}title") or "").endswith(
            f"{span.start:.6g} to {span.end:.6g} s"
        )
    text = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert (
        text[0] == timeline_summary(timeline, unit=" s") + "; from 4 to 10 s"
        and "step 27 s" in text[0]
    )
    assert "4 s" in text and "10 s" in text and "27 s" not in text


def test_kinds_and_later_stages_have_their_own_colours() -> None:
    """As the key says."""
    root = ElementTree.fromstring(
        timeline_svg(timeline_of(make_schedule("dualpipev", pp=2, microbatches=4)))
    )
    fills = {
        (rect.findtext(f"{SVG}title") or "")[:2]: rect.get("fill")
        for rect in root.iter(f"{SVG}rect")
        if rect.get("class") == "action"
    }
    assert len({fills[name] for name in ("0F", "0B", "0I", "0W", "3F", "3B", "3I", "3W")}) == 8
    keys = {rect.get("fill") for rect in root.iter(f"{SVG}rect") if rect.get("class") == "key"}
    assert keys == {fills[name] for name in ("0F", "0B", "0I", "0W", "3F")}


def test_json_says_everything() -> None:
    """Survives `json`; times, idle part and activations."""
    schedule = make_schedule("1f1b", pp=2, microbatches=1)
    durations = even(schedule, send=0.5)
    found = json.loads(json.dumps(timeline_json(simulate(schedule, durations), durations)))
    assert found["schedule"] == "1f1b" and found["stage_ranks"] == [0, 1] and found["total"] == 7
    assert found["durations"] == {
        "forward": [1, 1],
        "input": [1, 1],
        "weight": [1, 1],
        "send": [0.5],
    }
    assert found["bubble"] == pytest.approx(4 / 7) == found["ranks"][1]["bubble"]
    assert found["ranks"][0] == {
        "stages": [0],
        "bubble": pytest.approx(4 / 7),
        "peak_in_flight": 1,
        "actions": [
            {"action": "0F0", "start": 0, "end": 1},
            {"action": "0B0", "start": 5, "end": 7},
        ],
    }


def test_nothing_to_draw() -> None:
    """All durations 0."""
    timeline = timeline_of(
        make_schedule("1f1b", pp=2, microbatches=1), forward=0, input=0, weight=0
    )
    for draw in (
        lambda: timeline_lines(timeline, width=80, coloured=False),
        lambda: timeline_svg(timeline),
    ):
        with pytest.raises(InputError, match="every duration is 0"):
            draw()


def test_actions_without_duration_are_left_out() -> None:
    """A weight gradient that takes nothing has no cell; the others keep theirs."""
    assert "i0 I0" in plain(timeline_of(make_schedule("zbv", pp=1, microbatches=1), weight=0))[1]


def test_names() -> None:
    """One line each."""
    assert [name for name, _, _ in schedule_names()] == list(SCHEDULES)
    stages = {name: stages for name, stages, _ in schedule_names()}
    assert (
        stages["1f1b"] == "1 a rank"
        and stages["zbv"] == "2 a rank"
        and stages["interleaved-1f1b"] == "2 or more a rank"
    )
