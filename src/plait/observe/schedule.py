"""A pipeline schedule for the eye: lines of text for a terminal or a pipe, an SVG, and a JSON
object.

Draws a `Timeline`; times, bubbles and activations held are computed in
`plait.parallel.schedules.timeline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from plait.errors import InputError
from plait.observe.templating import render
from plait.parallel.schedules.actions import Kind
from plait.parallel.schedules.schedule import SCHEDULES, Schedule, ScheduleSpec
from plait.parallel.schedules.timeline import Durations, Span, Timeline, peak_in_flight

MEANINGS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward of the input",
    Kind.WEIGHT: "backward of the weights",
}
_STYLES = {
    Kind.FORWARD: ("white on blue", "black on bright_blue"),
    Kind.BACKWARD: ("white on green", "black on bright_green"),
    Kind.INPUT: ("white on magenta", "black on bright_magenta"),
    Kind.WEIGHT: ("black on yellow", "black on bright_yellow"),
}
"""For the first stage of a rank, and for its others."""
_FILLS = {
    Kind.FORWARD: ("#3b6fb6", "#9dbde6"),
    Kind.BACKWARD: ("#2f8f5b", "#9ad3b3"),
    Kind.INPUT: ("#8a4fa3", "#cfabdd"),
    Kind.WEIGHT: ("#c98a1b", "#edcb8b"),
}


def names() -> list[tuple[str, str, str]]:
    """Every schedule: name, stages a rank, one line about it."""
    return [(name, _allowed(spec), spec.summary) for name, spec in SCHEDULES.items()]


def _allowed(spec: ScheduleSpec) -> str:
    fewest, most = spec.stages_per_rank
    return f"{fewest} a rank" if most == fewest else f"{fewest} or more a rank"


def as_json(timeline: Timeline, durations: Durations) -> dict[str, Any]:
    """Everything as plain values, for `json.dumps`. In flight counts micro-batches through all
    stages of a rank.
    """
    schedule = timeline.schedule
    peaks = peak_in_flight(schedule)
    return {
        "schedule": schedule.name,
        "pp": schedule.pp,
        "microbatches": schedule.microbatches,
        "stage_ranks": list(schedule.stage_ranks),
        "durations": {
            name: list(getattr(durations, name)) for name in ("forward", "input", "weight", "send")
        },
        "total": timeline.total,
        "bubble": timeline.bubble_overall,
        "ranks": [
            {
                "stages": list(schedule.stages_of(rank)),
                "bubble": timeline.bubble(rank),
                "peak_in_flight": peaks[rank],
                "actions": [
                    {"action": str(span.action), "start": span.start, "end": span.end}
                    for span in row
                ],
            }
            for rank, row in enumerate(timeline.ranks)
        ],
    }


def summary(timeline: Timeline, *, unit: str = "") -> str:
    """One line: what it is, how long it takes, what is idle, what is held."""
    schedule = timeline.schedule
    stages = (
        f"{schedule.stages} stages on {schedule.pp} ranks"
        if schedule.stages > schedule.pp
        else _count(schedule.pp, "stage", "s")
    )
    work = _count(schedule.microbatches, "micro-batch", "es")
    idle = f"bubble {100 * timeline.bubble_overall:.1f} %"
    return (
        f"{schedule.name}, {stages}, {work}: step {timeline.total:.6g}{unit}, {idle}, at most"
        f" {max(peak_in_flight(schedule)):.4g} in flight"
    )


def _count(number: int, word: str, ending: str) -> str:
    return f"{number} {word}{ending if number > 1 else ''}"


def lines(timeline: Timeline, *, width: int, coloured: bool) -> list[Text]:
    """The drawing, a line a rank under a line of headings, then a legend.

    Every action with its name where that fits into `width` columns. Otherwise every column is the
    letter of the action in the middle of its slice of time. Raises InputError where nothing takes
    time.
    """
    _refuse_nothing(timeline)
    schedule = timeline.schedule
    head, heads = _heads(timeline)
    room = max(width - len(head), 20)
    unit = min(
        span.end - span.start for row in timeline.ranks for span in row if span.end > span.start
    )
    cell = 1 + max(len(_label(schedule, span)) for row in timeline.ranks for span in row)
    units = timeline.total / unit
    legend = [_legend(schedule)]
    if units * cell <= room:
        drawn = [_named(timeline, row, cell / unit, cell, coloured) for row in timeline.ranks]
    else:
        # whole columns a unit look even
        columns = int(room / units) * round(units) if units <= room else room
        drawn = [_sliced(timeline, row, columns, coloured) for row in timeline.ranks]
        legend.append(
            f"one column: {timeline.total / columns:.4g} of the step's {timeline.total:.6g}"
        )
    rows = [Text(start).append_text(line) for start, line in zip(heads, drawn, strict=True)]
    return [Text(head.rstrip()), *rows, *(Text(line) for line in legend)]


def _refuse_nothing(timeline: Timeline) -> None:
    if timeline.total <= 0:
        raise InputError(
            "every duration is 0, so there is nothing to draw; give forward, input or weight a time"
            " above 0"
        )


def _heads(timeline: Timeline) -> tuple[str, list[str]]:
    """The columns left of the drawing, and their headings, of one width."""
    schedule = timeline.schedule
    peaks = peak_in_flight(schedule)
    cells = [("rank", "stages", "idle", "in flight")]
    cells += [
        (
            str(rank),
            _some(schedule.stages_of(rank)),
            f"{100 * timeline.bubble(rank):.1f} %",
            f"{peaks[rank]:.4g}",
        )
        for rank in range(schedule.pp)
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    head, *heads = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + "  "
        for row in cells
    ]
    return head, heads


def _some(stages: Sequence[int]) -> str:
    shown = [str(stage) for stage in stages]
    return " ".join(shown if len(shown) <= 4 else [*shown[:2], "..", shown[-1]])


def _label(schedule: Schedule, span: Span) -> str:
    """As short as is clear: a rank with two stages tells them apart by capital and small letters,
    one with more by number.
    """
    if schedule.stages > 2 * schedule.pp:
        return str(span.action)
    return f"{_letter(schedule, span)}{span.action.microbatch}"


def _letter(schedule: Schedule, span: Span) -> str:
    return str(span.action.kind).lower() if _later(schedule, span) else str(span.action.kind)


def _later(schedule: Schedule, span: Span) -> int:
    """0 for the first stage of a rank, 1 for the others."""
    return int(span.action.stage >= schedule.pp)


def _legend(schedule: Schedule) -> str:
    kinds = {action.kind for row in schedule.ranks for action in row}
    words = ", ".join(f"{kind} {MEANINGS[kind]}" for kind in Kind if kind in kinds)
    small = "; small letters: a later stage of the rank" if schedule.stages > schedule.pp else ""
    through = " through all its stages" if schedule.stages > schedule.pp else ""
    return f"{words}{small}; in flight: micro-batches whose activations the rank holds{through}"


def _named(
    timeline: Timeline, row: Sequence[Span], scale: float, cell: int, coloured: bool
) -> Text:
    text = Text()

    def idle_until(column: int) -> None:
        text.append(
            "".join(
                "." if at % cell == 0 and not coloured else " " for at in range(len(text), column)
            )
        )

    for span in row:
        start = round(span.start * scale)
        end = round(span.end * scale)
        idle_until(start)
        if end > start:
            label = _label(timeline.schedule, span).ljust(end - start - 1, " " if coloured else "-")
            text.append(label, style=_style(timeline.schedule, span) if coloured else "")
            text.append(" ")
    idle_until(round(timeline.total * scale))
    if not coloured:
        text.rstrip()
    return text


def _style(schedule: Schedule, span: Span) -> str:
    return _STYLES[span.action.kind][_later(schedule, span)]


def _sliced(timeline: Timeline, row: Sequence[Span], columns: int, coloured: bool) -> Text:
    text = Text()
    spans = iter(row)
    span = next(spans)
    for column in range(columns):
        time = (column + 0.5) * timeline.total / columns
        while span.end <= time and (following := next(spans, None)) is not None:
            span = following
        if span.start <= time < span.end:
            text.append(
                _letter(timeline.schedule, span),
                style=_style(timeline.schedule, span) if coloured else "",
            )
        else:
            text.append(" " if coloured else ".")
    return text


_ROW = 28
_TOP = 64
_LEFT = 96
_WIDTH = 1200
_RIGHT = 190


def svg(timeline: Timeline, *, window: tuple[float, float] | None = None, unit: str = "") -> str:
    """A picture that needs nothing else: time to the right, a row a rank, every action with a
    tooltip, with its idle time and activations in flight.

    `window` draws only what runs between two times; `unit` is written behind times. Raises
    InputError where nothing takes time.
    """
    _refuse_nothing(timeline)
    schedule = timeline.schedule
    window = window or (0.0, timeline.total)
    heading = summary(timeline, unit=unit)
    if window != (0.0, timeline.total):
        heading += f"; from {window[0]:.4g} to {window[1]:.4g}{unit}"
    (first, last), peaks = window, peak_in_flight(schedule)
    return str(
        render(
            "timeline.svg",
            width=_LEFT + _WIDTH + _RIGHT,
            height=_TOP + _ROW * schedule.pp + 44,
            left=_LEFT,
            right=_LEFT + _WIDTH,
            top=_TOP,
            row_height=_ROW - 4,
            heading=heading,
            unit=unit,
            key=list(_key(schedule)),
            ticks=[
                (_LEFT + _WIDTH * tick / 8, first + (last - first) * tick / 8) for tick in range(9)
            ],
            rows=[_drawn(timeline, rank, peaks[rank], window, unit) for rank in range(schedule.pp)],
        )
    )


def _key(schedule: Schedule) -> Iterator[tuple[int, str, str]]:
    """(place, colour, meaning) of every kind of action."""
    kinds = {action.kind for row in schedule.ranks for action in row}
    entries = [(_FILLS[kind][0], f"{kind} {MEANINGS[kind]}") for kind in Kind if kind in kinds]
    if schedule.stages > schedule.pp:
        entries.append((_FILLS[Kind.FORWARD][1], "light: a later stage of the rank"))
    at = _LEFT
    for fill, words in entries:
        yield at, fill, words
        at += 40 + 7 * len(words)


def _drawn(
    timeline: Timeline, rank: int, peak: float, window: tuple[float, float], unit: str
) -> dict[str, Any]:
    """A rank's row."""
    top = _TOP + _ROW * rank
    first, last = window
    scale = _WIDTH / (last - first)
    spans = []
    for span in timeline.ranks[rank]:
        if (span.end <= first and span.start < first) or span.start >= last:
            continue
        start = max(span.start, first)
        end = min(span.end, last)
        later = _later(timeline.schedule, span)
        action = span.action
        spans.append(
            {
                "x": _LEFT + (start - first) * scale,
                "width": (end - start) * scale,
                "fill": _FILLS[action.kind][later],
                "tip": (
                    f"{action}: {MEANINGS[action.kind]} of stage {action.stage}, micro-batch"
                    f" {action.microbatch}, {span.start:.6g} to {span.end:.6g}{unit}"
                ),
                "label": str(action.microbatch),
                "ink": "#1a1a1a" if later else "#ffffff",
            }
        )
    note = f"idle {100 * timeline.bubble(rank):.1f} %, {peak:.4g} in flight"
    return {"top": top, "middle": top + _ROW / 2 + 4, "spans": spans, "note": note}
