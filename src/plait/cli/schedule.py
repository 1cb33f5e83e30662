"""Verb `plait schedule`: draws a pipeline schedule, without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.options import Json
from plait.cli.planning.tables import aligned
from plait.errors import InputError
from plait.observe.files import require_writable, write_text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_PIPE_WIDTH = 200
_MAX_ACTIONS = 2**20


@app.command()
def schedule(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A schedule such as 1f1b; `list` prints all names."),
    ],
    pp: Annotated[int, typer.Option(help="Number of pipeline ranks.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Micro-batches per optimizer step.")] = 8,
    stages_per_rank: Annotated[
        int | None,
        typer.Option(
            metavar="V", help="Stages per rank. (default: 1, or 2 if the schedule supports several)"
        ),
    ] = None,
    forward: Annotated[
        float,
        typer.Option(
            min=0, help="Time of the forward of a micro-batch through all stages of a rank."
        ),
    ] = 1.0,
    input_: Annotated[
        float,
        typer.Option("--input", min=0, help="Time of the gradients of the inputs of these stages."),
    ] = 1.0,
    weight: Annotated[
        float, typer.Option(min=0, help="Time of the gradients of the weights of these stages.")
    ] = 1.0,
    send: Annotated[
        float,
        typer.Option(
            min=0, help="Time of a message between two ranks, overlapped with computation."
        ),
    ] = 0.0,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the drawing as an SVG.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write a Chrome trace for ui.perfetto.dev. A unit of time is a second in it.",
        ),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            min=40,
            help=f"Columns of the drawing. (default: the terminal's, {_PIPE_WIDTH} in a pipe)",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw a pipeline schedule with the idle time of each rank and its micro-batches in flight."""
    from rich.console import Console

    from plait.observe import schedule as drawing
    from plait.observe.trace import chrome_trace
    from plait.parallel.schedules.schedule import make_schedule
    from plait.parallel.schedules.timeline import even, simulate

    console = Console(highlight=False, soft_wrap=True)
    if name == "list":
        _print_names(as_json)
        return
    require_writable("--svg", svg)
    require_writable("--trace", trace)
    if pp * microbatches * (stages_per_rank or 2) > _MAX_ACTIONS:
        raise InputError(
            f"--pp {pp} x --microbatches {microbatches}: {pp * microbatches:,} boxes, and at most"
            f" {_MAX_ACTIONS // 2:,} can be drawn; give fewer"
        )
    table = make_schedule(name, pp=pp, microbatches=microbatches, stages_per_rank=stages_per_rank)
    durations = even(table, forward=forward, input=input_, weight=weight, send=send)
    timeline = simulate(table, durations)
    if svg is not None:
        write_text("--svg", svg, drawing.timeline_svg(timeline))
    if trace is not None:
        content = chrome_trace(timeline, title=drawing.timeline_summary(timeline))
        write_text("--trace", trace, json.dumps(content) + "\n")
    if as_json:
        print(json.dumps(drawing.timeline_json(timeline, durations)))
        return
    columns = width or (console.width if console.is_terminal else _PIPE_WIDTH)
    lines = drawing.timeline_lines(timeline, width=columns, coloured=console.is_terminal)
    console.print(drawing.timeline_summary(timeline))
    for line in lines:
        console.print(line)


def _print_names(as_json: bool) -> None:
    from plait.observe.schedule import schedule_names

    rows = schedule_names()
    if as_json:
        keys = ("name", "stages", "summary")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows]))
        return
    print("\n".join(aligned(rows)))
