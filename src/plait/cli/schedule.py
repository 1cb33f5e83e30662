"""Verb `plait schedule`: draws a pipeline schedule, without a model."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from plait.cli.options import Json
from plait.cli.tables import aligned
from plait.errors import InputError

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
    as_json: Json = False,
) -> None:
    """Draw a pipeline schedule with the idle time of each rank and its micro-batches in flight."""
    from rich.console import Console

    from plait.observe import schedule as drawing
    from plait.parallel.schedules.schedule import make_schedule
    from plait.parallel.schedules.timeline import even, simulate

    console = Console(highlight=False, soft_wrap=True)
    if name == "list":
        _print_names(as_json)
        return
    if pp * microbatches * (stages_per_rank or 2) > _MAX_ACTIONS:
        raise InputError(
            f"--pp {pp} x --microbatches {microbatches}: {pp * microbatches:,} boxes, and at most"
            f" {_MAX_ACTIONS // 2:,} can be drawn; give fewer"
        )
    table = make_schedule(name, pp=pp, microbatches=microbatches, stages_per_rank=stages_per_rank)
    durations = even(table)
    timeline = simulate(table, durations)
    if as_json:
        print(json.dumps(drawing.timeline_json(timeline, durations)))
        return
    columns = console.width if console.is_terminal else _PIPE_WIDTH
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
