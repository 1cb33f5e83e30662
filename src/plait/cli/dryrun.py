"""Verb `plait dryrun`: builds and steps one rank of a layout without the other ranks.

The engine itself runs, and the results are printed next to the planner's prediction. The layout is
that of FILE if FILE fixes one, and otherwise the best one of a plan. Fake tensors need no memory
and no GPU; `--on-device` runs the kernels on this machine's GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.options import (
    Batch,
    Fix,
    Gpu,
    Json,
    Model,
    NprocPerNode,
    PlannedNnodes,
    PrecisionName,
    Seq,
    WorldSize,
    in_panel,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_option = in_panel("The dry run")
_EPILOG = "Example: plait dryrun --model llama-3-70b --world-size 1024 --gpu h100 --rank 1023"


@app.command(epilog=_EPILOG)
def dryrun(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A training configuration. Open values are planned."),
    ] = None,
    model: Model = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: PrecisionName = None,
    fix: Fix = None,
    gpu: Gpu = None,
    world_size: WorldSize = None,
    nnodes: PlannedNnodes = None,
    nproc_per_node: NprocPerNode = None,
    rank: Annotated[
        int | None,
        _option(metavar="R", min=0, help="Rank to run. (default: the one with the most memory)"),
    ] = None,
    full_step: Annotated[
        bool,
        _option("--full-step", help="Run all micro-batches, not only as many as reach the peak."),
    ] = False,
    on_device: Annotated[
        bool, _option("--on-device", help="Run the kernels on this machine's GPU.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Build and step one rank of a layout without the other ranks and without GPUs, and print its
    memory, traffic and operators. Exit code 1 if no layout fits.
    """
    from plait.cli.planning.dry_run import dry_run, print_dry_run
    from plait.cli.planning.query import own_layout, read_request
    from plait.cli.planning.show import print_nothing_fits
    from plait.planner import output
    from plait.planner import search as searching
    from plait.planner.explain import describe

    query = read_request(
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
    if own_layout(file, query.tree):
        layout = f"{file} fixes its layout, which is run as it is; nothing was searched"
        tree = query.base
    else:
        plan = searching.plan(query.request, fixed=query.fixed, best=1)
        if not plan.best:
            print_nothing_fits(plan)
            raise typer.Exit(1)
        layout = f"the best of {plan.candidates:,} layouts: {describe(plan.best[0].layout)}"
        tree = output.config_of(query.request, plan.best[0], query.base)

    result = dry_run(query.request, tree, rank=rank, full_step=full_step, on_device=on_device)
    if as_json:
        content = {**result.as_json(), "layout": layout, "notes": [*query.notes, *result.notes]}
        print(json.dumps(content, indent=1, default=float))
        return
    print(layout)
    for note in query.notes:
        print(f"note: {note}")
    print_dry_run(result)
