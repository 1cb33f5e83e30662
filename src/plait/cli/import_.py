"""`plait import`: checkpoints of DeepSpeed and torch as Plait's. Runs
`plait.checkpoint.foreign.convert`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.cli.interrupts import ending_in_order

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def import_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="What DeepSpeed (ZeRO 1 to 3) or torch.distributed.checkpoint wrote.",
        ),
    ],
    out: Annotated[
        str, typer.Option(metavar="FOLDER", help="A new folder of checkpoints, or a store's URL.")
    ],
    tag: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of the checkpoint; step-NNNNNNNN by default."),
    ] = None,
) -> None:
    """Write a checkpoint of DeepSpeed or torch as one that `engine.load_checkpoint` loads on any
    layout: weights, buffers, Adam's states.

    It is read in a process of its own, which runs nothing that the files name. What is not taken
    over is printed. Exit code 4 where it cannot be read.
    """
    from plait.checkpoint.foreign.convert import convert

    with ending_in_order():  # the process that reads ends too
        done = convert(source, out, tag=tag)
    typer.echo(
        f"wrote {done.checkpoint}: {done.kind}, step {done.steps:,}, {done.tensors} tensors and"
        f" {done.states} states"
    )
    for what in done.left_out:
        typer.echo(f"not taken over: {what}")
