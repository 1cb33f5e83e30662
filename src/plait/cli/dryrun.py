"""`plait dryrun`: one rank of a layout, built and stepped by the engine itself without its peers,
next to the planner's prediction.

FILE's own layout where it fixes one, else the best that a plan finds. On fake tensors it runs
anywhere and holds nothing; `--on-device` runs the kernels on this machine's GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.options import Json, in_panel
from plait.cli.planning.asked import (
    Batch,
    Fix,
    Gpu,
    Model,
    Nnodes,
    NprocPerNode,
    PrecisionName,
    Seq,
    WorldSize,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_how = in_panel("The dry run")
_EPILOG = "Example: plait dryrun --model llama-3-70b --world-size 1024 --gpu h100 --rank 1023"


@app.command(epilog=_EPILOG)
def dryrun(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]", help="A training configuration; what it leaves open is planned."
        ),
    ] = None,
    model: Model = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: PrecisionName = None,
    fix: Fix = None,
    gpu: Gpu = None,
    world_size: WorldSize = None,
    nnodes: Nnodes = None,
    nproc_per_node: NprocPerNode = None,
    rank: Annotated[
        int | None,
        _how(metavar="R", min=0, help="Which rank. (default: the one that needs most memory)"),
    ] = None,
    full_step: Annotated[
        bool, _how("--full-step", help="Run every micro-batch, not only up to the peak.")
    ] = False,
    on_device: Annotated[
        bool, _how("--on-device", help="Run the kernels on this machine's GPU.")
    ] = False,
    operators: Annotated[int, _how(min=1, metavar="N", help="How many operators to show.")] = 10,
    as_json: Json = False,
) -> None:
    """Build and step one rank of a layout without peers and GPUs: memory, traffic and operators.
    Exit code 1 if none fits.
    """
    from plait.cli.planning.dry_run import dry_run, print_dry_run
    from plait.cli.planning.request import own_layout, read_request
    from plait.cli.planning.show import print_nothing_fits
    from plait.planner import output
    from plait.planner import search as searching
    from plait.planner.explain import describe

    asked = read_request(
        file=file,
        model=model,
        world_size=world_size,
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        gpu=gpu,
        batch=batch,
        seq=seq,
        precision=precision,
        fix=fix,
        as_it_is=True,
    )
    if own_layout(file, asked.tree):
        said = f"{file} fixes its layout, which is run as it is; nothing was searched"
        tree = asked.base
    else:
        found = searching.plan(asked.request, fixed=asked.fixed, best=1)
        if not found.best:
            print_nothing_fits(found)
            raise typer.Exit(1)
        said = f"the best of {found.candidates:,} layouts: {describe(found.best[0].layout)}"
        tree = output.config_of(asked.request, found.best[0], asked.base)
    done = dry_run(asked.request, tree, rank=rank, full_step=full_step, on_device=on_device)
    if as_json:
        print(
            json.dumps(
                {**done.as_json(), "layout": said, "notes": [*asked.notes, *done.notes]},
                indent=1,
                default=float,
            )
        )
        return
    print(said)
    for note in asked.notes:
        print(f"note: {note}")
    print_dry_run(done, operators=operators)
