"""`plait plan`: which layout, how fast, what it takes, and why: before a GPU is booked. Prints what `plait.planner` says.

The command reads files and, where no GPU is named, looks at this machine; all else is arithmetic. `--evaluate` predicts a table of measured
runs instead and says how far off it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli.planning.rehearse import dry_run as rehearse_rank
from plait.cli.planning.rehearse import own_layout, print_dry_run
from plait.cli.planning.report import write_report, write_trace
from plait.cli.planning.request import read_calibration, read_request
from plait.cli.planning.show import print_evaluation, print_names, print_nothing_fits, print_plan, write_json
from plait.errors import InputError
from plait.observe.files import require_writable

if TYPE_CHECKING:
    from plait.planner.calibrate import Calibration
    from plait.planner.search import Request

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_EPILOG = """Examples:

plait plan --model llama-3-8b --gpus 64 --gpu h100 --seq 8192 --batch 512 --out run.json

plait plan --model ./my-model/config.json --gpus 16 --gpu a100 --why tp=4 --why stage=3

plait plan run.json --gpu h200 --gpus 8 --sensitivity

plait plan --model llama-3-70b --gpus 128 --gpu h100 --why neighbours --report plan.html --trace plan.json
plait plan --model llama-3-70b --gpus 1024 --gpu h100 --dry-run

plait plan --evaluate runs.csv --calibrate measured.csv --json report.json"""


@app.command(epilog=_EPILOG)
def plan(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A training configuration: its model, batch and sequence length are planned for."),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="A public model, a config.json, or a folder that holds one.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of all GPUs; by default those of this machine.")] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="What they are: h100, a100, mi300x and others; by default this machine's.")
    ] = None,
    per_node: Annotated[int | None, typer.Option(min=1, help="GPUs of a machine; by default usual for that GPU.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="A cluster file, in place of --gpus and --per-node.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of an optimizer step; by default about 4 Mi tokens.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens of a sample; by default 4096, or the file's.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; by default bf16 where the GPU has it.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Plan for compiled blocks.")] = False,
    fix: Annotated[list[str] | None, typer.Option(metavar="A=B", help="A value that the layout must have: tp=4, stage=3, pp=8.")] = None,
    why: Annotated[
        list[str] | None, typer.Option(metavar="A=B", help='Why not this one? May be repeated; "neighbours" compares all one step away.')
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Plan again with half and twice the network, links, memory, batch.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="How many layouts to show.")] = 5,
    memory_gib: Annotated[float | None, typer.Option(help="Memory of a GPU; by default the catalogue's.")] = None,
    network: Annotated[
        float | None, typer.Option(help="GB/s of a GPU to other machines: 25 is 200 Gb/s; by default the catalogue's.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also price what this version does not run; nothing is then written.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the best as the file that `plait train` runs, and FILE's .plan.json.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one HTML page: memory, time, timeline, ranks, candidates, what was left out.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the best layout's timeline as a Chrome trace, for ui.perfetto.dev.")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Constants of this GPU: what `plait calibrate` wrote (.json), or measured runs (.csv, or the .jsonl of run.history); by "
            "default those that ship.",
        ),
    ] = None,
    evaluate: Annotated[Path | None, typer.Option(metavar="CSV", help="Predict these measured runs and print the errors.")] = None,
    json_: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON; - is standard output.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build and step one rank of the best layout (of FILE's own, if FILE fixes one) without GPUs.")
    ] = False,
    rank: Annotated[
        int | None,
        typer.Option("--rank", metavar="R", min=0, help="With --dry-run: which rank; by default the one that needs most memory."),
    ] = None,
    whole_step: Annotated[
        bool, typer.Option("--whole-step", help="With --dry-run: run every micro-batch, not only as many as reach the peak.")
    ] = False,
    on_device: Annotated[
        bool, typer.Option("--on-device", help="With --dry-run: run the kernels on this machine's GPU; time and memory are then its own.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="Print the models and GPUs that have names.")] = False,
) -> None:
    """Search every layout of a model on a cluster: what fits, how fast, and why.

    Needs no GPU, no weights and no network. Times and memory carry an interval that holds nine times in ten. Exit code 1 if nothing fits.
    """
    if list_:
        print_names()
        return
    if evaluate is not None:
        if report is not None or trace is not None:
            raise InputError("--evaluate: nothing is planned, so there is no --report or --trace of it; leave one of them out")
        print_evaluation(evaluate, calibrate, json_)
        return
    from plait.planner.space import parse_fixed

    require_writable("--report", report)
    require_writable("--trace", trace)
    wishes = [(text, parse_fixed([text])) for text in why or () if text != "neighbours"]
    asked = read_request(
        file=file,
        model=model,
        gpus=gpus,
        gpu=gpu,
        per_node=per_node,
        cluster=cluster,
        batch=batch,
        seq=seq,
        precision=precision,
        compiled=compiled,
        memory_gib=memory_gib,
        network=network,
        everything=everything,
        fixed=parse_fixed(fix or []),
    )
    request, base, notes = asked.request, asked.base, asked.notes
    for name, given in (("--rank", rank is not None), ("--whole-step", whole_step), ("--on-device", on_device)):
        if given and not dry_run:
            raise InputError(f"{name} says how a dry run is done; add --dry-run, or leave it out")
    if everything and dry_run:
        raise InputError("--dry-run: with --all the best layout may be one that this version does not run; leave one of the two out")
    if everything and out is not None:
        raise InputError("--out: with --all the best layout may be one that this version does not run; leave one of the two out")
    calibration, of_runs = read_calibration(calibrate, request)
    rehearsed = {"rank": rank, "whole_step": whole_step, "on_device": on_device} if dry_run else None
    if rehearsed is not None and own_layout(file, asked.tree):
        _dry_run_of_file(request, base, rehearsed, file=file, operators=top, json_=json_)
        return
    _plan(
        request,
        base,
        [*notes, *of_runs],
        fixed=asked.fixed,
        wishes=wishes,
        neighbours="neighbours" in (why or ()),
        calibration=calibration,
        sensitive=sensitivity,
        top=top,
        out=out,
        report=report,
        trace=trace,
        json_=json_,
        rehearsed=rehearsed,
    )


def _dry_run_of_file(
    request: Request, base: dict[str, Any], rehearsed: dict[str, Any], *, file: Path | None, operators: int, json_: str | None
) -> None:
    done = rehearse_rank(request, base, **rehearsed)
    if json_ is not None:
        write_json(json_, {"dry_run": done.as_json()})
    if json_ != "-":
        print(f"{file} fixes its layout, which is run as it is; nothing was searched")
        print_dry_run(done, operators=2 * operators)


def _plan(
    request: Request,
    base: dict[str, Any],
    notes: list[str],
    *,
    fixed: dict[str, int],
    wishes: list[tuple[str, dict[str, int]]],
    neighbours: bool,
    calibration: Calibration | None,
    sensitive: bool,
    top: int,
    out: Path | None,
    report: Path | None,
    trace: Path | None,
    json_: str | None,
    rehearsed: dict[str, Any] | None,
) -> None:
    from plait.planner import explain, output
    from plait.planner import search as searching
    from plait.planner.space import parse_fixed

    found = searching.plan(request, fixed=fixed, calibration=calibration, best=top)
    quiet = json_ == "-"
    if not found.best:
        print_nothing_fits(found)
        if report is not None:
            write_report(report, found, notes=notes, fixed=fixed, calibration=calibration)
        raise typer.Exit(1)
    if neighbours:
        wishes = wishes + [(text, parse_fixed([text])) for text in explain.neighbours(found)]
    reasons = [explain.why(found, wish, text, fixed=fixed, calibration=calibration) for text, wish in wishes]
    changes = explain.sensitivity(found, calibration=calibration) if sensitive else []
    written = output.write(found, out, base) if out is not None else None
    if report is not None:
        write_report(report, found, notes=notes, reasons=reasons, changes=changes, fixed=fixed, calibration=calibration)
    if trace is not None:
        write_trace(trace, found, calibration=calibration)
    done = rehearse_rank(request, output.config_of(request, found.best[0], base), **rehearsed) if rehearsed is not None else None
    if json_ is not None:
        whole = output.plan_as_json(found) | {
            "config": None if request.everything else output.config_of(request, found.best[0], base),
            "sidecar": output.sidecar_of(found, found.best[0]),
            "why": [{"wish": r.wish, "reason": r.reason, "other": output.choice_as_json(r.other) if r.other else None} for r in reasons],
            "sensitivity": [change.__dict__ for change in changes],
            "notes": notes,
            "dry_run": done.as_json() if done is not None else None,
        }
        write_json(json_, whole)
    if not quiet:
        print_plan(found, notes, reasons, changes)
        if done is not None:
            print_dry_run(done, operators=2 * top)
        if written is not None:
            print(f"wrote {written[0]} (run it with `plait train {written[0]}`) and {written[1]}")
        for path in (report, trace):
            if path is not None:
                print(f"wrote {path}")
