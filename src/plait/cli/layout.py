"""`plait layout FILE`: the layout of a run, without its devices: ranks on machines, the split of
every parameter, the bytes of a rank.

It needs the model's shapes, not its weights. The peak memory of a step is predicted by a run on
fake tensors. It predicts no times.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from plait.cli.options import PROCESSES, Json, Nnodes, Set, count
from plait.cli.planning.tables import print_table
from plait.cluster import accelerator
from plait.cluster.machines import Node, Topology, load
from plait.errors import InputError

if TYPE_CHECKING:
    from plait.config.resolving.resolve import Resolved
    from plait.parallel.accounting.peak import Peak

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def layout(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="The JSON or YAML file that describes the run; a DeepSpeed file too.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A folder, a config.json or a name on the hub, in place of the file's model.",
        ),
    ] = None,
    nnodes: Nnodes = 1,
    nproc_per_node: Annotated[
        int | None,
        count(*PROCESSES, help="Devices of a machine. (default: as many as the layout needs)"),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="A cluster file, in place of --nnodes and --nproc-per-node.")
    ] = None,
    override: Set = None,
    peak: Annotated[
        bool,
        typer.Option(
            "--peak",
            help=(
                "Predict the peak memory of a rank in a step, by a run on fake tensors: seconds to"
                " minutes."
            ),
        ),
    ] = False,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            min=2, help="--peak: tokens of a sequence. (default: the file's data.sequence_length)"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the ranks on the machines, how every parameter is split, the bytes of model states on a
    rank, and with --peak the peak memory of a rank in a training step, by kind of tensor and with
    the point of the step at which it occurs.
    """
    from plait.cluster.placement import grid, warning
    from plait.config.resolving.degrees import smallest_world
    from plait.config.resolving.resolve import load as load_config
    from plait.config.resolving.resolve import resolve
    from plait.units import dtype_of
    from plait.verify.choose import fields_of
    from plait.verify.model_under_test import transformers_model

    if cluster is not None and (nnodes != 1 or nproc_per_node is not None):
        raise InputError(
            f"--cluster {cluster}: defines the machines; leave --nnodes and --nproc-per-node out"
        )
    if sequence_length is not None and not peak:
        raise InputError(
            f"--sequence-length {sequence_length}: is for --peak only; add --peak, or leave it out"
        )
    config = load_config(file, override or ())
    if config.model is None and model is None:
        raise InputError(f"{file} has no `model` section; add one, or give --model")
    topology = _topology(cluster, nnodes, nproc_per_node, least=smallest_world(config.parallel))
    resolved = resolve(config, world_size=topology.world_size, micro_batch_size=1)
    fields, title = fields_of(config, model)
    module = transformers_model(
        fields, dtype=dtype_of(config.model.dtype if config.model is not None else "float32")
    )
    built = _parts(module, resolved)
    memory = _memory(resolved, built)
    length = sequence_length or (config.data.sequence_length if config.data is not None else None)
    peaks, why_not = _peaks(module, resolved, length) if peak else ({}, "predicted with --peak")
    said = warning(resolved.layout, topology)
    machines = grid(resolved.layout, topology)
    if as_json:
        report = {
            "layout": resolved.layout.degrees,
            "grid": machines,
            "memory": memory,
            "peak": [{"rank": rank, **peak.__dict__} for rank, peak in peaks.items()],
            "peak_not_foretold": why_not,
            "stages": [row.__dict__ for row in built["stages"]],
            "parameters": [row.__dict__ for row in built["rows"]],
            "warning": said,
        }
        print(json.dumps({"model": title, **report}))
        return
    _print(title, resolved, machines, built, memory, said)
    _print_peaks(resolved, peaks, why_not, length)


def _topology(cluster: Path | None, nodes: int, devices: int | None, *, least: int) -> Topology:
    if cluster is not None:
        return load(cluster)
    each = devices or max(1, -(-least // nodes))
    if nodes * each > MOST_SHOWN:
        raise InputError(
            f"--nnodes {nodes} x --nproc-per-node {each}: {nodes * each:,} devices, and at most"
            f" {MOST_SHOWN:,} are shown; give fewer"
        )
    return Topology(tuple(Node(f"node{index}", each) for index in range(nodes)), accelerator.NAME)


def _parts(module: Any, resolved: Resolved) -> dict[str, Any]:
    from plait.model.blocks import find_blocks
    from plait.model.facts import model_facts
    from plait.model.plans import describe, make_plan
    from plait.parallel.pipeline.account import stage_rows

    blocks = find_blocks(module, resolved.blocks or None)
    plan = None
    if resolved.layout.tp > 1:
        plan = make_plan(
            module, tp=resolved.layout.tp, user=resolved.tensor_parallel.plan, blocks=blocks
        )
    facts = model_facts(module, blocks, tensor_plan=plan)
    pipeline = resolved.pipeline.check(resolved.context(model=module, blocks=blocks))
    stages = stage_rows(pipeline.schedule, pipeline.cut, facts) if pipeline is not None else []
    return {
        "facts": facts,
        "plan": plan,
        "rows": describe(plan, module) if plan else [],
        "pipeline": pipeline,
        "stages": stages,
    }


def _memory(resolved: Resolved, built: dict[str, Any]) -> dict[str, int]:
    from plait.parallel.accounting.ledger import Ledger
    from plait.parallel.order import account_all
    from plait.parallel.pipeline.account import facts_of_rank

    at = resolved.layout
    facts = built["facts"]
    pipeline = built["pipeline"]
    if pipeline is not None:
        facts = facts_of_rank(facts, pipeline.cut, pipeline.schedule.stages_of(0))
    start = Ledger.of_rank(
        at, accumulation=resolved.batch.accumulation, optimizer_states=resolved.optimizer.states
    )
    return {
        kind: int(count[0])
        for kind, count in account_all(resolved.techniques, start, facts).memory.items()
    }


def _peaks(
    module: Any, resolved: Resolved, length: int | None
) -> tuple[dict[int, Peak], str | None]:
    """The peak of the first rank of every pipeline stage, which holds the most of its stage; or why
    there is none.
    """
    from plait.dryrun.predicted_peak import predict_peak, why_not_predicted

    if length is None:
        return {}, "the file has no data.sequence_length; give --sequence-length too"
    reason = why_not_predicted(resolved)
    if reason is not None:
        return {}, f"not modelled yet: {reason}"
    samples = resolved.batch.micro_batch_size
    first: dict[int, int] = {}
    for rank in range(resolved.layout.world_size):
        first.setdefault(resolved.layout.coordinates(rank)["pp"], rank)
    return {
        rank: predict_peak(module, resolved, rank=rank, samples=samples, length=length).peak
        for rank in first.values()
    }, None


def _print_peaks(
    resolved: Resolved, peaks: dict[int, Peak], why_not: str | None, length: int | None
) -> None:
    from plait.parallel.accounting.timeline_points import PEAK_KINDS
    from plait.units import format_bytes

    console = Console(soft_wrap=True, highlight=False)
    if why_not is not None:
        console.print(f"peak of a step: {why_not}")
        return
    batch = resolved.batch
    console.print(
        f"peak of a step of {batch.accumulation} micro-batches of {batch.micro_batch_size} x"
        f" {length} tokens a data-parallel rank"
    )
    columns = ("kind", *(f"rank {rank}" for rank in peaks))
    found = list(peaks.values())
    rows = [
        [said, *(format_bytes(peak.kinds[kind]) for peak in found)]
        for kind, said in PEAK_KINDS.items()
        if any(peak.kinds[kind] for peak in found)
    ]
    rows.append(["peak", *(format_bytes(peak.peak_bytes) for peak in found)])
    rows.append(["timeline point", *(peak.moment for peak in found)])
    rows += [
        [f"peak of {phase}", *(format_bytes(peak.phases[phase]) for peak in found)]
        for phase in ("forward", "backward", "optimizer step")
    ]
    print_table(console, columns, rows, indent="")


_MEANINGS = {
    "parameters": "parameters",
    "gradients": "gradients at the optimizer step",
    "optimizer": "optimizer states (two a parameter, as AdamW; in the form of optimizer.states)",
    "gathered_parameters": "gathered parameters between micro-batches",
    "unsharded_gradients": "unsharded gradients between micro-batches",
    "host": "of these, in host memory",
    "files": "of these, in files",
    "step_buffers": "of those in files, in memory at once",
}


def _print(
    title: str,
    resolved: Resolved,
    nodes: list[list[str]],
    built: dict[str, Any],
    memory: dict[str, int],
    said: str | None,
) -> None:
    from plait.units import format_bytes, format_count

    console = Console(soft_wrap=True, highlight=False)
    facts = built["facts"]
    stage = f"ZeRO stage {resolved.data_parallel.stage}"
    console.print(
        f"{title}: {format_count(facts.numel)} parameters, {len(facts.blocks)} blocks;"
        f" {resolved.layout}, {stage}"
    )
    if said:
        console.print(f"warning: {said}", style="yellow")
    rows = _shortened([[name, _in_short(cells)] for name, *cells in nodes])
    tables: list[tuple[tuple[str, ...], list[list[str]]]] = [(("node", "ranks"), rows)]
    if built["rows"]:
        console.print(f"split over tp by {built['plan'].source}; the first block stands for all")
        split = [
            [r.parameter, _shape(r.shape), r.style, _shape(r.local_shape), r.note]
            for r in _collapsed(built["rows"], facts.blocks)
        ]
        tables.append((("parameter", "shape", "style", "on rank 0", "note"), split))
    if built["stages"]:
        from plait.parallel.pipeline.account import balance

        schedule = built["pipeline"].schedule
        largest = balance(built["stages"])
        console.print(
            f"pipeline: {schedule.name}, {schedule.microbatches} micro-batches, slowest rank"
            f" {largest:.3f} x the mean"
        )
        owned = [
            [
                str(row.stage),
                str(row.rank),
                f"{len(row.blocks)}",
                f"{row.blocks[0]} ... {row.blocks[-1]}",
                format_count(row.parameters),
            ]
            for row in built["stages"]
        ]
        tables.append((("stage", "pp rank", "blocks", "", "parameters"), owned))
    states = [
        [_MEANINGS[kind], str(memory[kind]), format_bytes(memory[kind])]
        for kind in _MEANINGS
        if memory.get(kind)
    ]
    tables.append((("model states on rank 0", "bytes", ""), states))
    for columns, rows in tables:
        print_table(console, columns, rows, indent="")


MOST_SHOWN = 2**17
"""Devices, each of which is a row of what is computed here."""
_FIRST = 6
_CELLS = 8
"""Machines, and devices of a machine, that are shown one by one."""


def _shortened(rows: list[list[str]]) -> list[list[str]]:
    """The first machines and the last; what is between goes on in the same order. --json has
    all.
    """
    if len(rows) <= _FIRST + 2:
        return rows
    return [
        *rows[:_FIRST],
        ["...", f"{len(rows) - _FIRST - 1} more machines, in the same order"],
        rows[-1],
    ]


def _in_short(cells: list[str]) -> str:
    if len(cells) <= _CELLS:
        return " | ".join(cells)
    return " | ".join([*cells[: _CELLS - 1], f"... {len(cells) - _CELLS} more ...", cells[-1]])


def _collapsed(rows: list[Any], blocks: tuple[str, ...]) -> list[Any]:
    """The parameters of the first block stand for those of all: blocks are equal."""
    later = tuple(f"{block}." for block in blocks[1:])
    return [row for row in rows if not row.parameter.startswith(later)] if later else rows


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in shape)
