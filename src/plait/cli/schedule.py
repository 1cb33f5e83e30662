"""`plait schedule NAME`: what a pipeline schedule does when, before a model exists: a drawing, its
idle time, the activations it holds.
"""

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
_MOST_ACTIONS = 2**20


@app.command()
def schedule(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A schedule, for example 1f1b; `list` names them all."),
    ],
    pp: Annotated[int, typer.Option(help="Pipeline ranks.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Micro-batches of an optimizer step.")] = 8,
    stages_per_rank: Annotated[
        int | None,
        typer.Option(
            metavar="V", help="Stages on a rank. Default: 1, or 2 where the schedule takes several."
        ),
    ] = None,
    forward: Annotated[
        float,
        typer.Option(
            min=0, help="Time of a forward of one micro-batch through all stages of a rank."
        ),
    ] = 1.0,
    input_: Annotated[
        float, typer.Option("--input", min=0, help="Time of the gradient of the input, likewise.")
    ] = 1.0,
    weight: Annotated[
        float, typer.Option(min=0, help="Time of the gradients of the weights, likewise.")
    ] = 1.0,
    send: Annotated[
        float,
        typer.Option(
            min=0, help="Time of one message between two ranks, overlapped with computation."
        ),
    ] = 0.0,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture too.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a Chrome trace too, for ui.perfetto.dev; a unit of time is a second there.",
        ),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            min=40, help=f"Columns to draw in. Default: the terminal's, {_PIPE_WIDTH} in a pipe."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw a pipeline schedule: its timeline, the idle time of each rank, and its micro-batches in
    flight.
    """
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
    if pp * microbatches * (stages_per_rank or 2) > _MOST_ACTIONS:
        raise InputError(
            f"--pp {pp} x --microbatches {microbatches}: {pp * microbatches:,} boxes, and at most"
            f" {_MOST_ACTIONS // 2:,} can be drawn; give fewer"
        )
    table = make_schedule(name, pp=pp, microbatches=microbatches, stages_per_rank=stages_per_rank)
    durations = even(table, forward=forward, input=input_, weight=weight, send=send)
    timeline = simulate(table, durations)
    if svg is not None:
        write_text("--svg", svg, drawing.timeline_svg(timeline))
    if trace is not None:
        write_text(
            "--trace",
            trace,
            json.dumps(chrome_trace(timeline, title=drawing.timeline_summary(timeline))) + "\n",
        )
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

    if as_json:
        print(
            json.dumps(
                [
                    {"name": name, "stages": stages, "summary": summary}
                    for name, stages, summary in schedule_names()
                ]
            )
        )
        return
    print("\n".join(aligned(schedule_names())))
