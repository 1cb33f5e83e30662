"""`plait plan`: which layout, how fast, what it takes, and why: before you rent GPUs. Prints the
results of `plait.planner`.

The command reads files and, where no GPU is named, looks at this machine; all else is arithmetic.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.options import Json
from plait.cli.planning.asked import (
    Batch,
    ClusterFile,
    Fix,
    Gpu,
    MemoryGib,
    Model,
    Network,
    Nnodes,
    NprocPerNode,
    PrecisionName,
    Seq,
    WorldSize,
)
from plait.errors import InputError
from plait.observe.files import require_writable, write_text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_NAMES = "models"


@app.command()
def plan(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE|models|infer]",
            help="A training configuration to plan for; `models` prints what has a name.",
        ),
    ] = None,
    model: Model = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: PrecisionName = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Plan for compiled blocks.")] = False,
    fix: Fix = None,
    gpu: Gpu = None,
    world_size: WorldSize = None,
    nnodes: Nnodes = None,
    nproc_per_node: NprocPerNode = None,
    cluster: ClusterFile = None,
    memory_gib: MemoryGib = None,
    network: Network = None,
    why: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A=B",
            help="Why not tp=4? Or: neighbours, sensitivity. May be repeated.",
        ),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="How many layouts to show.")
    ] = 5,
    everything: Annotated[
        bool, typer.Option("--all", help="Also price what this version does not run.")
    ] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Constants that `plait calibrate` wrote.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the best as the file that `plait train` runs."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="--out: replace a file that no plan wrote.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one HTML page of it all.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the best layout's timeline, for ui.perfetto.dev."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Search every layout of a model on a cluster: what fits, how fast, and why. Exit code 1 if
    nothing fits. See also `plan infer`.
    """
    from plait.cli.planning.request import read_calibration, read_request
    from plait.cli.planning.show import (
        names_as_json,
        print_names,
        print_nothing_fits,
        print_plan,
        write_trace,
    )
    from plait.observe.report.plan import PlanReport, plan_page
    from plait.planner import explain, output
    from plait.planner import search as searching
    from plait.planner.fixed import parse_fixed

    if file == Path(_NAMES) and not file.exists():
        print(json.dumps(names_as_json())) if as_json else print_names()
        return
    _check_files(file, out, report, trace, everything=everything, force=force)
    why = why or []
    queries = [
        (text, parse_fixed([text])) for text in why if text not in ("neighbours", "sensitivity")
    ]
    asked = read_request(
        file=file,
        model=model,
        world_size=world_size,
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        gpu=gpu,
        cluster=cluster,
        batch=batch,
        seq=seq,
        precision=precision,
        compiled=compiled,
        memory_gib=memory_gib,
        network=network,
        everything=everything,
        fix=fix,
    )
    request = asked.request
    fixed = asked.fixed
    calibration = read_calibration(calibrate, request)
    notes = list(asked.notes)
    found = searching.plan(request, fixed=fixed, calibration=calibration, best=top)
    if not found.best:
        print_nothing_fits(found)
        if report is not None:
            write_text(
                "--report",
                report,
                plan_page(PlanReport(found, notes, fixed=fixed, calibration=calibration)),
            )
        raise typer.Exit(1)
    if asked.base and not everything:
        output.check_runs(request, output.config_of(request, found.best[0], asked.base))
    around = (
        [(text, parse_fixed([text])) for text in explain.neighbours(found)]
        if "neighbours" in why
        else []
    )
    told = [
        explain.why(found, query, text, fixed=fixed, calibration=calibration)
        for text, query in queries
    ]
    beside = [
        explain.why(found, query, text, fixed=fixed, calibration=calibration)
        for text, query in around
    ]
    reasons = [*told, *beside]
    changes = explain.sensitivity(found, calibration=calibration) if "sensitivity" in why else []
    written = output.write(found, out, asked.base) if out is not None else None
    if report is not None:
        write_text(
            "--report",
            report,
            plan_page(PlanReport(found, notes, reasons, changes, fixed, calibration)),
        )
    if trace is not None:
        write_trace(trace, found, calibration=calibration)
    if as_json:
        whole = output.plan_as_json(found) | {
            "config": None if everything else output.config_of(request, found.best[0], asked.base),
            "sidecar": output.sidecar_of(found, found.best[0]),
            "why": [
                {
                    "query": r.query,
                    "reason": r.reason,
                    "other": output.choice_as_json(r.other) if r.other else None,
                }
                for r in reasons
            ],
            "sensitivity": [change.__dict__ for change in changes],
            "notes": notes,
        }
        print(json.dumps(whole, indent=1, default=float))
        return
    print_plan(found, notes, told, beside, changes)
    if written is not None:
        print(f"wrote {written[0]} (run it with `plait train {written[0]}`) and {written[1]}")
    for path in (report, trace):
        if path is not None:
            print(f"wrote {path}")


def _check_files(
    file: Path | None,
    out: Path | None,
    report: Path | None,
    trace: Path | None,
    *,
    everything: bool,
    force: bool,
) -> None:
    """Before anything takes time. A file that was edited by hand is replaced only with --force."""
    require_writable("--report", report)
    require_writable("--trace", trace)
    if out is None:
        if force:
            raise InputError("--force: is for --out; add --out, or leave it out")
        return
    if out.suffix != ".json":
        raise InputError(
            f"--out {out}: the configuration is written as JSON; give a name that ends in .json"
        )
    if everything:
        raise InputError(
            "--out: with --all the best layout may be one that this version does not run; leave one"
            " of the two out"
        )
    from plait.planner.output import is_own

    try:
        exists = out.exists()
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written ({error.strerror})") from None
    if exists and not force and not is_own(out):
        again = (
            " and is what is planned for"
            if file is not None and file.exists() and out.samefile(file)
            else ""
        )
        raise InputError(
            f"--out {out}: exists{again}, and is not as `plait plan` wrote it; give another name,"
            " or add --force to replace it"
        )
