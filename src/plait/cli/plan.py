"""Verb `plait plan`: finds the fastest layout that fits, and explains it.

The command reads files and, if no GPU is named, the devices of this machine. The results are
computed by `plait.planner`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli.options import (
    Batch,
    Fix,
    Gpu,
    Json,
    MemoryGib,
    Model,
    Network,
    NprocPerNode,
    PlannedNnodes,
    PrecisionName,
    Seq,
    WorldSize,
)
from plait.errors import InputError

if TYPE_CHECKING:
    from plait.cli.planning.query import PlanQuery
    from plait.planner.calibrate import Calibration
    from plait.planner.explain import Comparison
    from plait.planner.search import Plan

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_LIST_NAMES = "models"
"""Argument that prints the names of models and GPUs."""


@app.command()
def plan(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE|models|infer]",
            help="A training configuration to plan for. `models` prints all names.",
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
    nnodes: PlannedNnodes = None,
    nproc_per_node: NprocPerNode = None,
    memory_gib: MemoryGib = None,
    network: Network = None,
    why: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A=B",
            help="Explain why not tp=4, or all neighbours. Repeatable.",
        ),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Number of layouts to show.")
    ] = 5,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Constants that `plait calibrate` wrote.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the best layout as a file for `plait train`."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Search all layouts of a model on a cluster, and print which fit, how fast they are, and why.
    Exit code 1 if nothing fits. See also `plan infer`.
    """
    from plait.cli.planning.query import read_calibration, read_request
    from plait.cli.planning.show import (
        names_as_json,
        print_names,
        print_nothing_fits,
        print_plan,
    )
    from plait.planner import explain, output
    from plait.planner import search as searching
    from plait.planner.offers import parse_fixed

    if file == Path(_LIST_NAMES) and not file.exists():
        if as_json:
            print(json.dumps(names_as_json()))
        else:
            print_names()
        return
    # Wrong options are refused before the search, which can take long.
    _check_out(file, out)
    why = why or []
    requested = [text for text in why if text != "neighbours"]
    for text in requested:
        parse_fixed([text])
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
        compiled=compiled,
        memory_gib=memory_gib,
        network=network,
        fix=fix,
    )
    request = query.request
    fixed = query.fixed
    calibration = read_calibration(calibrate, request)
    notes = query.notes
    result = searching.plan(request, fixed=fixed, calibration=calibration, best=top)
    if not result.best:
        print_nothing_fits(result)
        raise typer.Exit(1)

    if query.base:
        output.check_runs(request, output.config_of(request, result.best[0], query.base))
    reasons = _compare(result, requested, fixed, calibration)
    neighbours: list[Comparison] = []
    if "neighbours" in why:
        neighbours = _compare(result, explain.neighbours(result), fixed, calibration)

    written = None
    if out is not None:
        written = output.write(result, out, query.base)
    if as_json:
        content = _to_json(result, query, [*reasons, *neighbours])
        print(json.dumps(content, indent=1, default=float))
        return
    print_plan(result, notes, reasons, neighbours)
    if written is not None:
        print(f"wrote {written[0]} (run it with `plait train {written[0]}`) and {written[1]}")


def _compare(
    result: Plan,
    texts: Sequence[str],
    fixed: Mapping[str, int],
    calibration: Calibration | None,
) -> list[Comparison]:
    """Compare the best layout with the best layouts that have certain values, such as `tp=4`."""
    from plait.planner import explain
    from plait.planner.offers import parse_fixed

    return [
        explain.why(result, parse_fixed([text]), text, fixed=fixed, calibration=calibration)
        for text in texts
    ]


def _to_json(result: Plan, query: PlanQuery, reasons: list[Comparison]) -> dict[str, Any]:
    from plait.planner import output

    answers = []
    for reason in reasons:
        other = output.choice_as_json(reason.other) if reason.other else None
        answers.append({"query": reason.query, "reason": reason.reason, "other": other})
    return output.plan_as_json(result) | {
        "config": output.config_of(query.request, result.best[0], query.base),
        "sidecar": output.sidecar_of(result, result.best[0]),
        "why": answers,
        "notes": query.notes,
    }


def _check_out(file: Path | None, out: Path | None) -> None:
    """Check --out before the search. A file that was edited by hand is not replaced."""
    if out is None:
        return
    if out.suffix != ".json":
        raise InputError(
            f"--out {out}: the configuration is written as JSON; give a name that ends in .json"
        )
    from plait.planner.output import is_unchanged

    try:
        exists = out.exists()
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written ({error.strerror})") from None
    if exists and not is_unchanged(out):
        is_input = ""
        if file is not None and file.exists() and out.samefile(file):
            is_input = ", is the file to plan for"
        raise InputError(
            f"--out {out}: exists{is_input}, and is not an unchanged output of `plait plan`; use"
            " another name, or delete it first"
        )
