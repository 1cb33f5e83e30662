"""Drawings of a pipeline schedule: lines of text for a console, and a JSON object.

They show a `Timeline`. Times, bubbles and the number of activations are computed in
`plait.parallel.schedules.timeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from plait.names import number_of
from plait.parallel.schedules.schedule import SCHEDULES, Kind, Schedule, ScheduleSpec
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
"""Console styles for the first stage of a rank, and for its other stages."""


def schedule_names() -> list[tuple[str, str, str]]:
    """Return (name, stages per rank, summary) of every schedule."""
    return [(name, _stage_count(spec), spec.summary) for name, spec in SCHEDULES.items()]


def _stage_count(spec: ScheduleSpec) -> str:
    fewest, most = spec.stages_per_rank
    if most == fewest:
        return f"{fewest} per rank"
    return f"{fewest} or more per rank"


def timeline_json(timeline: Timeline, durations: Durations) -> dict[str, Any]:
    """Return a timeline as plain values for `json.dumps`.

    `peak_in_flight` is a number of micro-batches. With several stages per rank, a micro-batch whose
    activations one stage holds counts as 1 / (stages per rank).
    """
    schedule = timeline.schedule
    peaks = peak_in_flight(schedule)
    ranks = []
    for rank, row in enumerate(timeline.ranks):
        actions = [
            {"action": str(span.action), "start": span.start, "end": span.end} for span in row
        ]
        ranks.append(
            {
                "stages": list(schedule.stages_of(rank)),
                "bubble": timeline.bubble(rank),
                "peak_in_flight": peaks[rank],
                "actions": actions,
            }
        )
    return {
        "schedule": schedule.name,
        "pp": schedule.pp,
        "microbatches": schedule.microbatches,
        "stage_ranks": list(schedule.stage_ranks),
        "durations": {
            "forward": list(durations.forward),
            "input": list(durations.input),
            "weight": list(durations.weight),
            "send": list(durations.send),
        },
        "total": timeline.total,
        "bubble": timeline.bubble_overall,
        "ranks": ranks,
    }


def timeline_summary(timeline: Timeline) -> str:
    """Return a line with a schedule, its duration, bubble and peak micro-batches in flight."""
    schedule = timeline.schedule
    stages = number_of(schedule.pp, "stage")
    if schedule.stages > schedule.pp:
        stages = f"{schedule.stages} stages on {schedule.pp} ranks"
    micro_batches = number_of(schedule.microbatches, "micro-batch")
    return (
        f"{schedule.name}, {stages}, {micro_batches}: step {timeline.total:.6g}, bubble"
        f" {100 * timeline.bubble_overall:.1f} %, at most {max(peak_in_flight(schedule)):.4g} in"
        " flight"
    )


def timeline_lines(timeline: Timeline, *, width: int, coloured: bool) -> list[Text]:
    """Draw a timeline as text.

    Every action has its name if all names fit into `width` columns. Otherwise every column is a
    slice of time and shows the letter of the action at its middle.

    Args:
        timeline: The timeline.
        width: Number of columns of the console.
        coloured: Whether idle time is blank and actions have colours. Otherwise idle time has dots.

    Returns:
        A line of headings, one line per rank, and a legend.
    """
    schedule = timeline.schedule
    heading, row_labels = _row_labels(timeline)
    # A drawing of fewer columns shows nothing.
    available = max(width - len(heading), 20)
    spans = [span for row in timeline.ranks for span in row]
    shortest = min(span.end - span.start for span in spans if span.end > span.start)
    # A blank separates two names.
    cell_width = 1 + max(len(_label(schedule, span)) for span in spans)
    shortest_per_step = timeline.total / shortest

    legend = [_legend(schedule)]
    # Names fit if the shortest action has room for the longest name.
    if shortest_per_step * cell_width <= available:
        scale = cell_width / shortest
        drawings = [
            _draw_names(timeline, row, scale, cell_width, coloured) for row in timeline.ranks
        ]
    else:
        columns = available
        if shortest_per_step <= available:
            # Equal actions get equal widths if the shortest one takes a whole number of columns.
            columns = int(available / shortest_per_step) * round(shortest_per_step)
        drawings = [_draw_slices(timeline, row, columns, coloured) for row in timeline.ranks]
        legend.append(
            f"one column: {timeline.total / columns:.4g} of the step's {timeline.total:.6g}"
        )
    rows = []
    for label, drawing in zip(row_labels, drawings, strict=True):
        row = Text(label)
        row.append_text(drawing)
        rows.append(row)
    return [Text(heading.rstrip()), *rows, *map(Text, legend)]


def _row_labels(timeline: Timeline) -> tuple[str, list[str]]:
    """Return (heading, one label per rank) for the left of the drawing, all of equal width."""
    schedule = timeline.schedule
    peaks = peak_in_flight(schedule)
    table = [("rank", "stages", "idle", "in flight")]
    for rank in range(schedule.pp):
        stages = _abbreviate(schedule.stages_of(rank))
        idle = f"{100 * timeline.bubble(rank):.1f} %"
        table.append((str(rank), stages, idle, f"{peaks[rank]:.4g}"))

    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = map(str.rjust, row, widths)
        lines.append("  ".join(cells) + "  ")
    return lines[0], lines[1:]


def _abbreviate(stages: Sequence[int]) -> str:
    numbers = list(map(str, stages))
    if len(numbers) > 4:
        numbers = [*numbers[:2], "..", numbers[-1]]
    return " ".join(numbers)


def _label(schedule: Schedule, span: Span) -> str:
    """Return the shortest unambiguous name of an action.

    Capital and small letters distinguish two stages of a rank. With more stages per rank, the name
    contains the number of the stage.
    """
    if schedule.stages > 2 * schedule.pp:
        return str(span.action)
    return f"{_letter(schedule, span)}{span.action.microbatch}"


def _letter(schedule: Schedule, span: Span) -> str:
    letter = str(span.action.kind)
    return letter.lower() if _is_later_stage(schedule, span) else letter


def _is_later_stage(schedule: Schedule, span: Span) -> bool:
    """Return False for the first stage of a rank, and True for its other stages."""
    return span.action.stage >= schedule.pp


def _legend(schedule: Schedule) -> str:
    kinds = {action.kind for row in schedule.ranks for action in row}
    legend = ", ".join(f"{kind} {MEANINGS[kind]}" for kind in Kind if kind in kinds)
    if schedule.stages > schedule.pp:
        legend += "; small letters: a later stage of the rank"
    legend += "; in flight: micro-batches whose activations the rank holds"
    if schedule.stages > schedule.pp:
        legend += " through all its stages"
    return legend


def _draw_names(
    timeline: Timeline, row: Sequence[Span], scale: float, cell_width: int, coloured: bool
) -> Text:
    """Draw the row of a rank with the name of every action. `scale` is columns per time unit."""
    text = Text()

    def draw_idle(end: int) -> None:
        for column in range(len(text), end):
            has_dot = column % cell_width == 0 and not coloured
            # Without colours, dots show where idle time begins and how long it is.
            text.append("." if has_dot else " ")

    for span in row:
        start = round(span.start * scale)
        end = round(span.end * scale)
        draw_idle(start)
        if end > start:
            label = _label(timeline.schedule, span)
            filler = " " if coloured else "-"
            text.append(
                label.ljust(end - start - 1, filler), style=_style(timeline, span, coloured)
            )
            text.append(" ")
    draw_idle(round(timeline.total * scale))
    if not coloured:
        text.rstrip()
    return text


def _style(timeline: Timeline, span: Span, coloured: bool) -> str:
    if not coloured:
        return ""
    return _STYLES[span.action.kind][_is_later_stage(timeline.schedule, span)]


def _draw_slices(timeline: Timeline, row: Sequence[Span], columns: int, coloured: bool) -> Text:
    """Draw the row of a rank with one letter per slice of time."""
    text = Text()
    spans = iter(row)
    span = next(spans)
    for column in range(columns):
        time = (column + 0.5) * timeline.total / columns
        while span.end <= time and (following := next(spans, None)) is not None:
            span = following
        if span.start <= time < span.end:
            letter = _letter(timeline.schedule, span)
            text.append(letter, style=_style(timeline, span, coloured))
        else:
            text.append(" " if coloured else ".")
    return text
