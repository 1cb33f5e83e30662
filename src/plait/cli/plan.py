"""`plait plan`: which layout, how fast, what it takes, and why: before a GPU is booked. Prints what `plait.planner` says.

The command reads files and, where no GPU is named, looks at this machine; all else is arithmetic. `--evaluate` predicts a table of measured
runs instead and says how far off it is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from plait.planner.calibrate import Calibration
    from plait.planner.explain import Change, Comparison
    from plait.planner.hardware import Cluster
    from plait.planner.search import Plan, Request

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_TOKENS = 4 * 2**20
"""Tokens of a step where no batch is given: usual for models of more than a few billion parameters."""

_EPILOG = """Examples:

plait plan --model llama-3-8b --gpus 64 --gpu h100 --seq 8192 --batch 512 --out run.json

plait plan --model ./my-model/config.json --gpus 16 --gpu a100 --why tp=4 --why stage=3

plait plan run.json --gpu h200 --gpus 8 --sensitivity

plait plan --evaluate runs.csv --calibrate measured.csv --json report.json"""


@app.command(epilog=_EPILOG)
def plan(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A training configuration: its model, batch and sequence length are planned for.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="A public model, a config.json, or a folder that holds one.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of all GPUs. [default: those of this machine]")] = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="What they are: h100, a100, mi300x ... [default: this machine's]")] = None,
    per_node: Annotated[int | None, typer.Option(min=1, help="GPUs of a machine. [default: usual for that GPU]")] = None,
    cluster: Annotated[Path | None, typer.Option(help="A cluster file, in place of --gpus and --per-node.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of an optimizer step. [default: about 4 Mi tokens]")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens of a sample. [default: 4096, or the file's]")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32. [default: bf16 where the GPU has it]")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Plan for compiled blocks.")] = False,
    fix: Annotated[list[str] | None, typer.Option(metavar="A=B", help="A value that the layout must have: tp=4, stage=3, pp=8.")] = None,
    why: Annotated[
        list[str] | None, typer.Option(metavar="A=B", help='Why not this one? May be repeated; "neighbours" compares all one step away.')
    ] = None,
    sensitivity: Annotated[bool, typer.Option("--sensitivity", help="Plan again with half and twice the network, links, memory, batch.")] = False,
    top: Annotated[int, typer.Option(min=1, help="How many layouts to show.")] = 5,
    memory_gib: Annotated[float | None, typer.Option(help="Memory of a GPU. [default: the catalogue's]")] = None,
    network: Annotated[float | None, typer.Option(help="GB/s of a GPU to other machines: 25 is 200 Gb/s. [default: the catalogue's]")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also price what this version does not run; nothing is then written.")
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the best as the file that `plait train` runs, and FILE's .plan.json.")] = None,
    calibrate: Annotated[Path | None, typer.Option(metavar="CSV", help="Measured runs of this GPU and framework that move the constants.")] = None,
    evaluate: Annotated[Path | None, typer.Option(metavar="CSV", help="Predict these measured runs and print the errors.")] = None,
    json_: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON; - is standard output.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Print the models and GPUs that have names.")] = False,
) -> None:
    """Search every layout of a model on a cluster: what fits, how fast, and why.

    Needs no GPU, no weights and no network. Times and memory carry an interval that holds nine times in ten. Exit code 1 if nothing fits.
    """
    if list_:
        _list()
        return
    if evaluate is not None:
        _evaluate(evaluate, calibrate, json_)
        return
    from plait.planner.space import parse_fixed

    wishes = [(text, parse_fixed([text])) for text in why or () if text != "neighbours"]
    request, base, notes = _request(
        file=file, model=model, gpus=gpus, gpu=gpu, per_node=per_node, cluster=cluster, batch=batch, seq=seq, precision=precision,
        compiled=compiled, memory_gib=memory_gib, network=network, everything=everything,
    )  # fmt: skip
    if everything and out is not None:
        raise InputError("--out: with --all the best layout may be one that this version does not run; leave one of the two out")
    calibration = _calibration(calibrate, request)
    _plan(request, base, notes, fixed=parse_fixed(fix or []), wishes=wishes, neighbours="neighbours" in (why or ()), calibration=calibration,
          sensitive=sensitivity, top=top, out=out, json_=json_)  # fmt: skip


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
    json_: str | None,
) -> None:
    from plait.planner import explain, output
    from plait.planner import search as searching
    from plait.planner.space import parse_fixed

    found = searching.plan(request, fixed=fixed, calibration=calibration, best=top)
    quiet = json_ == "-"
    if not found.best:
        _tell_nothing_fits(found)
        raise typer.Exit(1)
    if neighbours:
        wishes = wishes + [(text, parse_fixed([text])) for text in explain.neighbours(found)]
    reasons = [explain.why(found, wish, text, calibration=calibration) for text, wish in wishes]
    changes = explain.sensitivity(found, calibration=calibration) if sensitive else []
    written = output.write(found, out, base) if out is not None else None
    if json_ is not None:
        whole = output.plan_as_json(found) | {
            "config": None if request.everything else output.config_of(request, found.best[0], base),
            "sidecar": output.sidecar_of(found, found.best[0]),
            "why": [{"wish": r.wish, "reason": r.reason, "other": output.choice_as_json(r.other) if r.other else None} for r in reasons],
            "sensitivity": [change.__dict__ for change in changes],
            "notes": notes,
        }
        _write_json(json_, whole)
    if not quiet:
        _print(found, notes, reasons, changes)
        if written is not None:
            print(f"wrote {written[0]} (run it with `plait train {written[0]}`) and {written[1]}")


# ---- what is planned --------------------------------------------------------------------------------------------------------------------


def _request(
    *,
    file: Path | None,
    model: str | None,
    gpus: int | None,
    gpu: str | None,
    per_node: int | None,
    cluster: Path | None,
    batch: int | None,
    seq: int | None,
    precision: str | None,
    compiled: bool,
    memory_gib: float | None,
    network: float | None,
    everything: bool,
) -> tuple[Request, dict[str, Any], list[str]]:
    from plait.planner.architecture import Model, find_model, from_config
    from plait.planner.search import Request

    base: dict[str, Any] = {}
    notes: list[str] = []
    planned = None
    if file is not None:
        from plait.config.resolve import load
        from plait.config.source import read

        config = load(file)
        base = dict(read(file).tree)
        if isinstance(config.train_batch_size, int):
            batch = batch or config.train_batch_size
        if config.data is not None:
            seq = seq or config.data.sequence_length
        if config.model is not None and config.model.config is not None:
            vocab = config.data.vocab_size if config.data is not None else None
            planned = Model(from_config(config.model.config, source=str(file), vocab=vocab), {"config": dict(config.model.config)})
        elif config.model is not None and config.model.path is not None and model is None:
            planned = find_model(config.model.path)
        compiled = compiled or config.compile.enabled is True
    sequence = seq or 4096
    if model is not None:
        planned = find_model(model, sequence=sequence)
        base.pop("model", None)
    if planned is None:
        raise InputError("--model: nothing to plan for; name a public model (`plait plan --list`), a config.json, or a training configuration")
    machines = _cluster(gpus, gpu, per_node, cluster, memory_gib, network)
    if precision is None:
        precision = next(p for p in ("bf16", "fp16", "fp32") if p in machines.device.flops)
        precision = "fp32" if machines.device.name == "cpu" else precision
    elif precision not in ("bf16", "fp16", "fp32"):
        raise InputError(f"--precision {precision}: not one that Plait trains in; use bf16, fp16 or fp32")
    if batch is None:
        batch = max(1, round(_TOKENS / sequence / machines.devices)) * machines.devices
        notes.append(f"batch {batch}: about 4 Mi tokens a step; set it with --batch")
    if machines.device.name == "cpu" and gpu is None:
        notes.append("no GPU here: planned for this machine's processes; name others with --gpu and --gpus")
    return Request(planned, machines, batch, sequence, precision, compiled, everything), base, notes


def _cluster(
    gpus: int | None, gpu: str | None, per_node: int | None, file: Path | None, memory_gib: float | None, network: float | None
) -> Cluster:
    from plait.planner.hardware import cluster, cluster_of
    from plait.units import GIB

    changes: dict[str, float | None] = {
        "memory_bytes": memory_gib * GIB if memory_gib else None,
        "nic_bandwidth": network * 1e9 if network else None,
    }
    if file is not None:
        from plait.cluster.machines import load

        topology = load(file)
        if gpu is None and topology.device_type == "cuda":
            raise InputError(f"{file}: a cluster file does not say which GPUs they are; add --gpu, for example --gpu h100")
        return cluster_of(topology, gpu or "cpu", **changes)
    if gpu is not None:
        if gpus is None:
            raise InputError(f"--gpu {gpu}: how many? add --gpus, for example --gpus 8")
        return cluster(gpu, gpus, devices_per_node=per_node, **changes)
    from plait.cluster.topology import discover

    topology = discover()
    name = "cpu"
    if topology.device_type == "cuda":
        import torch

        name = torch.cuda.get_device_name(0)
    if gpus is not None:
        changes["memory_bytes"] = changes["memory_bytes"] or topology.memory_bytes
        return cluster(name, gpus, devices_per_node=per_node or min(gpus, topology.nodes[0].devices) if name != "cpu" else per_node or gpus, **changes)
    return cluster_of(topology, name, **changes)


def _calibration(path: Path | None, request: Request) -> Calibration | None:
    if path is None:
        return None
    from plait.planner.calibrate import calibrate
    from plait.planner.runs import read_rows, read_runs

    name = request.cluster.device.name
    rows = [row for row in read_rows(path) if _same_device(row, str(name))]
    if not rows:
        raise InputError(f"{path}: no row was measured on {name}; give rows whose `gpu` is one")
    return calibrate(read_runs(rows))


def _same_device(row: Any, name: str) -> bool:
    from plait.planner.hardware import device

    try:
        return str(device(row.get("gpu") or "").name) == name
    except InputError:
        return False


# ---- what is printed --------------------------------------------------------------------------------------------------------------------


def _console() -> Console:
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False)


def _print(found: Plan, notes: list[str], reasons: list[Comparison], changes: list[Change]) -> None:
    from plait.cli.tables import print_table
    from plait.planner.explain import describe
    from plait.units import GIB, format_count

    console, request, best = _console(), found.request, found.best[0]
    model = request.model.architecture
    print(f"{model.name}: {format_count(float(model.parameters))} parameters; {request.cluster}")
    print(f"batch {request.global_batch} x {request.sequence} tokens, {request.precision}; {found.candidates:,} layouts priced, {found.fitting:,} fit")
    for note in notes:
        print(f"note: {note}")
    room = float(request.cluster.device.memory_bytes) / GIB
    rows = [
        [
            str(index + 1),
            describe(choice.layout),
            f"{choice.seconds:.4g} s ({choice.seconds_low:.3g} to {choice.seconds_high:.3g})",
            format_count(choice.tokens_per_second),
            f"{choice.mfu:.1%}",
            f"{choice.needed / GIB:.1f} (to {choice.needed_high / GIB:.1f}) of {room:.1f} GiB",
        ]
        for index, choice in enumerate(found.best)
    ]
    print_table(console, ("", "layout", "step (90 %)", "tokens/s", "MFU", "memory (90 %)"), rows)
    from plait.planner.memory import TERMS as MEMORY_TERMS
    from plait.planner.step import TERMS

    times = [[TERMS[name], f"{value:.4g} s", f"{value / best.seconds:.1%}"] for name, value in best.terms.items() if value > 0.0005 * best.seconds]
    print_table(console, ("1: the step", "", ""), times)
    sizes = [[MEMORY_TERMS[name], f"{value / GIB:.2f} GiB"] for name, value in best.memory_terms.items() if value > 0]
    sizes += [["allocated", f"{best.allocated / GIB:.2f} GiB"], ["reserved", f"{best.reserved / GIB:.2f} GiB"], ["with the context", f"{best.needed / GIB:.2f} GiB"]]
    print_table(console, (f"1: memory at its peak, {best.moment}", ""), sizes)
    for comparison in reasons:
        print(f"why not {comparison.reason}")
        if comparison.other is not None and comparison.other is not comparison.winner:
            table = [[TERMS[name], f"{ours:.3g} s", f"{theirs:.3g} s"] for name, ours, theirs in comparison.differences[:6] if abs(ours - theirs) > 1e-4]
            print_table(console, ("term", "plan", describe(comparison.other.layout)), table)
    if changes:
        table = [[c.what, f"{c.seconds:.4g} s" if c.seconds else "-", format_count(c.tokens_per_second) if c.tokens_per_second else "-", c.layout or c.note] for c in changes]
        print_table(console, ("if it had", "step", "tokens/s", "best layout"), table)
    left_out = [[e.region, e.rule] for e in found.excluded] + [[s.region, str(s)] for s in found.shortages]
    print_table(console, ("left out", "because"), left_out[:12])
    if len(left_out) > 12:
        print(f"and {len(left_out) - 12} more regions; --json lists them")


def _tell_nothing_fits(found: Plan) -> None:
    request = found.request
    print(f"plait: nothing fits: {request.model.architecture.name} on {request.cluster}", file=sys.stderr)
    for shortage in sorted(found.shortages, key=lambda s: s.needed)[:4]:
        print(f"plait: {shortage.region} {shortage}", file=sys.stderr)
    if found.fitting:
        print(f"plait: {found.fitting} layouts would fit by a margin smaller than the uncertainty of their memory", file=sys.stderr)
    print("plait: use more GPUs, GPUs with more memory, shorter samples (--seq), or a smaller model", file=sys.stderr)


def _list() -> None:
    from plait.cli.tables import print_table
    from plait.planner import architecture, hardware
    from plait.units import GIB, format_count

    console = _console()
    models = []
    for name in architecture.names():
        one = architecture.named(name)
        assert one is not None
        models.append([name, format_count(float(one.parameters)), f"{one.layers} x {one.hidden}, {one.heads} heads, vocabulary {one.vocab}"])
    print_table(console, ("model", "parameters", "shape"), models)
    devices = []
    for name in hardware.device_names():
        one_device = hardware.device(name)
        peak = max(one_device.flops.get(p, 0) for p in ("bf16", "fp16", "fp32"))
        devices.append([name, one_device.title, f"{one_device.memory_bytes / GIB:.1f} GiB", f"{peak / 1e12:.4g} TFLOP/s", f"{one_device.devices_per_node} a node"])
    print_table(console, ("gpu", "", "memory", "16 bits", ""), devices)


def _write_json(path: str, content: Any) -> None:
    text = json.dumps(content, indent=1, default=float)
    if path == "-":
        print(text)
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--json {path}: cannot be written ({error.strerror})") from None


# ---- evaluation -------------------------------------------------------------------------------------------------------------------------


def _evaluate(path: Path, calibrate: Path | None, json_: str | None) -> None:
    from plait.cli.tables import print_table
    from plait.planner.evaluate import as_json, summary
    from plait.planner.evaluate import evaluate as evaluate_rows
    from plait.planner.runs import read_rows

    found = evaluate_rows(read_rows(path), calibrate=read_rows(calibrate) if calibrate is not None else ())
    if json_ is not None:
        _write_json(json_, as_json(found))
        if json_ == "-":
            return
    told = summary(found)
    console = _console()
    print(f"{told['rows']} rows, {told['predicted']} predicted, {told['used_to_calibrate']} used to calibrate")
    columns = ("", "", "rows", "median", "mean", "P90", "bias", "in 90 %")
    for key, title in (("time", "step time"), ("time_experts", "step time, models with experts"), ("memory", "peak memory")):
        rows = [
            [group, name, str(e["rows"]), *(f"{e[k]:.1%}" for k in ("median", "mean", "p90", "bias", "coverage"))]
            for group, table in told[key].items()
            for name, e in table.items()
        ]
        print_table(console, columns, rows, title=f"error of {title}")
    ranked, fit = told["ranking"], told["fit"]
    if ranked:
        print(
            f"ranking: in {ranked['top3_within_5_percent']:.1%} of {ranked['groups']} groups the best of the predicted top 3 is within 5 % of the best; "
            f"mean regret {ranked['mean_regret_1']:.1%} of the first, {ranked['mean_regret_3']:.1%} of the first three"
        )
    if fit["out_of_memory"]:
        print(f"fit: of {fit['out_of_memory']} rows that ran out of memory {fit['called_fits']} were called fitting ({fit['false_fits']:.1%})")
    if fit["ran"]:
        print(f"fit: of {fit['ran']} rows that ran {fit['called_out_of_memory']} were called out of memory ({fit['false_alarms']:.1%})")
    print_table(console, ("rows", "not priced because"), [[str(count), reason] for reason, count in told["not_priced"].items()])
