"""Verb `plait import`: converts checkpoints of DeepSpeed and torch.

The conversion is in `plait.checkpoint.foreign.convert`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from plait.cli.terminal import exit_on_signals

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def import_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="Checkpoint of DeepSpeed (ZeRO 1 to 3) or torch.distributed.checkpoint.",
        ),
    ],
    out: Annotated[
        str,
        typer.Option(
            metavar="FOLDER", help="New folder for the checkpoint, or its URL in a store."
        ),
    ],
    tag: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the checkpoint. (default: step-NNNNNNNN)"),
    ] = None,
) -> None:
    """Convert a checkpoint of DeepSpeed or torch to one that `engine.load_checkpoint` loads on any
    layout: weights, buffers and the states of Adam.

    The files are read in a separate process, which runs no code that they name. Everything that is
    not converted is printed. Exit code 4 if the checkpoint cannot be read.
    """
    from plait.checkpoint.foreign.convert import convert

    # The exception of a signal also ends the process that reads.
    with exit_on_signals():
        converted = convert(source, out, tag=tag)
    typer.echo(
        f"wrote {converted.checkpoint}: {converted.kind}, step {converted.steps:,},"
        f" {converted.tensors} tensors and {converted.states} states"
    )
    for name in converted.left_out:
        typer.echo(f"not converted: {name}")
