"""Commands that draw a pipeline schedule or the layout of a run. They need no devices.

`plait layout` prints the ranks on the machines, the shards of every parameter and the memory of a
rank. Only the shapes of the model are needed, not its weights. A run on fake tensors predicts the
peak memory of a step. Times are not predicted. `plait schedule` needs no model at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from plait.cli.options import PROCESSES, Json, Nnodes, RunFile, Set, count
from plait.cli.terminal import aligned, print_table
from plait.cluster import accelerator
from plait.cluster.machines import Node, Topology
from plait.errors import ConfigError, InputError

if TYPE_CHECKING:
    from plait.config.resolving.resolve import Resolved
    from plait.parallel.accounting.peak import Peak

_MAX_TOKENS = 2**31 - 1
"""Maximum of `data.sequence_length`. Torch cannot count the elements of far longer sequences."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def layout(
    file: RunFile,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A folder, config.json or name on the hub, instead of the file's model.",
        ),
    ] = None,
    nnodes: Nnodes = 1,
    nproc_per_node: Annotated[
        int | None,
        count(*PROCESSES, help="Devices per machine. (default: as many as the layout requires)"),
    ] = None,
    override: Set = None,
    peak: Annotated[
        bool,
        typer.Option(
            "--peak",
            help=(
                "Predict the peak memory of a step by a run on fake tensors, which takes seconds"
                " to minutes."
            ),
        ),
    ] = False,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=_MAX_TOKENS,
            help="--peak: tokens per sequence. (default: the file's data.sequence_length)",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the ranks on the machines, the shards of parameters, and the memory of model states.

    With --peak, predict the peak memory of a rank in a training step, by kind of tensor and
    with the point of the step at which it occurs.
    """
    from plait.cluster.layout import crossing_warning, rank_grid
    from plait.config.resolving.resolve import load as load_config
    from plait.config.resolving.resolve import resolve
    from plait.config.resolving.resolved_parts import smallest_world
    from plait.sizes import dtype_of
    from plait.verify.choose import fields_of
    from plait.verify.model_under_test import transformers_model

    if sequence_length is not None and not peak:
        raise InputError(
            f"--sequence-length {sequence_length}: is for --peak only; add --peak, or leave it out"
        )
    config = load_config(file, override or ())
    if config.model is None and model is None:
        raise InputError(f"{file} has no `model` section; add one, or pass --model")
    topology = _topology(nnodes, nproc_per_node, required=smallest_world(config.parallel))
    # The micro-batch size changes no shard, so a file without one can be shown as well.
    resolved = resolve(config, world_size=topology.world_size, micro_batch_size=1)
    fields, title = fields_of(config, model)
    dtype = config.model.dtype if config.model is not None else "float32"
    module = transformers_model(fields, dtype=dtype_of(dtype))
    model_layout = _model_layout(module, resolved)
    memory = _model_states(resolved, model_layout)

    length = sequence_length
    if length is None and config.data is not None:
        length = config.data.sequence_length
    peaks: dict[int, Peak] = {}
    no_peak: str | None = "predicted with --peak"
    if peak:
        peaks, no_peak = _predict_peaks(module, resolved, length)

    placement_warning = crossing_warning(resolved.layout, topology)
    machines = rank_grid(resolved.layout, topology)
    if as_json:
        content = {
            "model": title,
            "layout": resolved.layout.degrees,
            "grid": machines,
            "memory": memory,
            "peak": [{"rank": rank, **peak.__dict__} for rank, peak in peaks.items()],
            "peak_not_foretold": no_peak,
            "stages": [row.__dict__ for row in model_layout.stages],
            "parameters": [row.__dict__ for row in model_layout.shards],
            "warning": placement_warning,
        }
        print(json.dumps(content))
        return
    _print_layout(title, resolved, machines, model_layout, memory, placement_warning)
    _print_peaks(resolved, peaks, no_peak, length)


@dataclass(frozen=True)
class ModelLayout:
    """Sizes of a model, and the way in which a layout shards and splits it."""

    facts: Any
    tensor_plan: Any
    shards: list[Any]
    """Rows about the tensor-parallel shards of parameters."""
    pipeline: Any
    stages: list[Any]
    """Rows about the pipeline stages."""


def _topology(nodes: int, devices: int | None, *, required: int) -> Topology:
    """Return the machines. `required` is the number of devices that the layout requires."""
    # Rounded up, so that the machines together have enough devices.
    per_node = devices or max(1, -(-required // nodes))
    if nodes * per_node > MAX_DEVICES:
        raise InputError(
            f"--nnodes {nodes} x --nproc-per-node {per_node}: {nodes * per_node:,} devices, but at"
            f" most {MAX_DEVICES:,} are shown; pass fewer"
        )
    machines = tuple(Node(f"node{index}", per_node) for index in range(nodes))
    return Topology(machines, accelerator.NAME)


def _model_layout(module: Any, resolved: Resolved) -> ModelLayout:
    from plait.model.blocks import find_blocks
    from plait.model.facts import model_facts
    from plait.model.plans import describe, make_plan
    from plait.parallel.pipeline.estimates import stage_rows

    blocks = find_blocks(module, resolved.blocks or None)
    plan = None
    if resolved.layout.tp > 1:
        plan = make_plan(
            module, tp=resolved.layout.tp, user=resolved.tensor_parallel.plan, blocks=blocks
        )
    facts = model_facts(module, blocks, tensor_plan=plan)
    pipeline = resolved.pipeline.plan(resolved.context(model=module, blocks=blocks))
    stages = []
    if pipeline is not None:
        stages = stage_rows(pipeline.schedule, pipeline.cut, facts)
    return ModelLayout(
        facts=facts,
        tensor_plan=plan,
        shards=describe(plan, module) if plan else [],
        pipeline=pipeline,
        stages=stages,
    )


def _model_states(resolved: Resolved, model_layout: ModelLayout) -> dict[str, int]:
    """Return the bytes of each kind of model state on rank 0."""
    from plait.parallel.accounting.ledger import Ledger
    from plait.parallel.order import account_all
    from plait.parallel.pipeline.estimates import facts_of_rank

    facts = model_layout.facts
    pipeline = model_layout.pipeline
    if pipeline is not None:
        facts = facts_of_rank(facts, pipeline.cut, pipeline.schedule.stages_of(0))
    ledger = Ledger.of_rank(
        resolved.layout,
        accumulation=resolved.batch.accumulation,
        optimizer_states=resolved.optimizer.states,
    )
    return {
        kind: int(sizes[0])
        for kind, sizes in account_all(resolved.techniques, ledger, facts).memory.items()
    }


def _predict_peaks(
    module: Any, resolved: Resolved, length: int | None
) -> tuple[dict[int, Peak], str | None]:
    """Return (predicted peaks by rank, None), or ({}, reason) if nothing can be predicted.

    One process per pipeline rank is run: the first one, which holds the largest shards.
    """
    from plait.dryrun.predicted_peak import predict_peak, why_not_predicted

    if length is None:
        return {}, "the file has no data.sequence_length; pass --sequence-length too"
    reason = why_not_predicted(resolved)
    if reason is not None:
        return {}, f"not modelled yet: {reason}"
    samples = resolved.batch.micro_batch_size
    first_ranks: dict[int, int] = {}
    for rank in range(resolved.layout.world_size):
        first_ranks.setdefault(resolved.layout.coordinates(rank)["pp"], rank)
    peaks = {
        rank: predict_peak(module, resolved, rank=rank, samples=samples, length=length).peak
        for rank in first_ranks.values()
    }
    return peaks, None


def _print_peaks(
    resolved: Resolved, peaks: dict[int, Peak], no_peak: str | None, length: int | None
) -> None:
    from plait.parallel.accounting.peak import PEAK_KINDS
    from plait.sizes import format_bytes

    console = Console(soft_wrap=True, highlight=False)
    if no_peak is not None:
        console.print(f"peak of a step: {no_peak}")
        return
    batch = resolved.batch
    console.print(
        f"peak of a step of {batch.accumulation} micro-batches of {batch.micro_batch_size} x"
        f" {length} tokens per data-parallel rank"
    )
    columns = ("kind", *(f"rank {rank}" for rank in peaks))
    rank_peaks = list(peaks.values())
    rows = []
    for kind, meaning in PEAK_KINDS.items():
        if any(peak.kinds[kind] for peak in rank_peaks):
            rows.append([meaning, *(format_bytes(peak.kinds[kind]) for peak in rank_peaks)])
    rows.append(["peak", *(format_bytes(peak.peak_bytes) for peak in rank_peaks)])
    rows.append(["timeline point", *(peak.moment for peak in rank_peaks)])
    for phase in ("forward", "backward", "optimizer step"):
        sizes = [format_bytes(peak.phases[phase]) for peak in rank_peaks]
        rows.append([f"peak of {phase}", *sizes])
    print_table(console, columns, rows, indent="")


_STATE_NAMES = {
    "parameters": "parameters",
    "gradients": "gradients at the optimizer step",
    "optimizer": "optimizer states (two per parameter, as AdamW; stored as optimizer.states)",
    "gathered_parameters": "gathered parameters between micro-batches",
    "unsharded_gradients": "unsharded gradients between micro-batches",
    "host": "of these, in host memory",
    "files": "of these, in files",
    "step_buffers": "of those in files, in memory at once",
}
MAX_DEVICES = 2**17
"""Largest number of devices, for each of which a row is computed."""
_SHOWN_MACHINES = 6
_SHOWN_DEVICES = 8
"""Numbers of machines, and of devices of a machine, that are shown individually."""


def _print_layout(
    title: str,
    resolved: Resolved,
    nodes: list[list[str]],
    model_layout: ModelLayout,
    memory: dict[str, int],
    placement_warning: str | None,
) -> None:
    from plait.sizes import format_bytes, format_count

    console = Console(soft_wrap=True, highlight=False)
    facts = model_layout.facts
    console.print(
        f"{title}: {format_count(facts.numel)} parameters, {len(facts.blocks)} blocks;"
        f" {resolved.layout}, ZeRO stage {resolved.data_parallel.stage}"
    )
    if placement_warning:
        console.print(f"warning: {placement_warning}", style="yellow")

    machines = _abbreviate([[name, _abbreviate_devices(cells)] for name, *cells in nodes])
    # All sentences are printed before the tables.
    tables: list[tuple[tuple[str, ...], list[list[str]]]] = [(("node", "ranks"), machines)]
    if model_layout.shards:
        console.print(
            f"split over tp by {model_layout.tensor_plan.source}; the first block stands for all"
        )
        shards = [
            [row.parameter, _shape(row.shape), row.style, _shape(row.local_shape), row.note]
            for row in _of_first_block(model_layout.shards, facts.blocks)
        ]
        tables.append((("parameter", "shape", "style", "on rank 0", "note"), shards))
    if model_layout.stages:
        from plait.parallel.pipeline.estimates import rank_imbalance

        schedule = model_layout.pipeline.schedule
        console.print(
            f"pipeline: {schedule.name}, {schedule.microbatches} micro-batches, slowest rank"
            f" {rank_imbalance(model_layout.stages):.3f} x the mean"
        )
        stages = []
        for row in model_layout.stages:
            blocks = f"{row.blocks[0]} ... {row.blocks[-1]}"
            stages.append(
                [
                    str(row.stage),
                    str(row.rank),
                    str(len(row.blocks)),
                    blocks,
                    format_count(row.parameters),
                ]
            )
        tables.append((("stage", "pp rank", "blocks", "", "parameters"), stages))
    states = []
    for kind, name in _STATE_NAMES.items():
        if memory.get(kind):
            states.append([name, str(memory[kind]), format_bytes(memory[kind])])
    tables.append((("model states on rank 0", "bytes", ""), states))
    for columns, rows in tables:
        print_table(console, columns, rows, indent="")


def _abbreviate(rows: list[list[str]]) -> list[list[str]]:
    """Return the rows of the first machines and of the last one."""
    if len(rows) <= _SHOWN_MACHINES + 2:
        return rows
    hidden = len(rows) - _SHOWN_MACHINES - 1
    return [
        *rows[:_SHOWN_MACHINES],
        ["...", f"{hidden} more machines, in the same order"],
        rows[-1],
    ]


def _abbreviate_devices(cells: list[str]) -> str:
    if len(cells) > _SHOWN_DEVICES:
        hidden = f"... {len(cells) - _SHOWN_DEVICES} more ..."
        cells = [*cells[: _SHOWN_DEVICES - 1], hidden, cells[-1]]
    return " | ".join(cells)


def _of_first_block(rows: list[Any], blocks: tuple[str, ...]) -> list[Any]:
    """Return the rows without those of later blocks, which equal the rows of the first block."""
    later_blocks = tuple(f"{block}." for block in blocks[1:])
    return [row for row in rows if not row.parameter.startswith(later_blocks)]


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in shape)


schedule_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_OPTION_OF_KEY = {
    "gradient_accumulation_steps": "--microbatches",
    "parallel.pp": "--pp",
    "parallel.pipeline.schedule": "NAME",
    "parallel.pipeline.stages_per_rank": "--stages-per-rank",
}
_PIPE_WIDTH = 200
_MAX_ACTIONS = 2**20


@schedule_app.command()
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
    from plait.observe import schedule as drawing
    from plait.parallel.schedules.schedule import make_schedule
    from plait.parallel.schedules.timeline import even, simulate

    console = Console(highlight=False, soft_wrap=True)
    if name == "list":
        _print_names(as_json)
        return
    if pp * microbatches * (stages_per_rank or 2) > _MAX_ACTIONS:
        raise InputError(
            f"--pp {pp} x --microbatches {microbatches}: {pp * microbatches:,} boxes, but at most"
            f" {_MAX_ACTIONS // 2:,} can be drawn; pass fewer"
        )
    try:
        table = make_schedule(
            name, pp=pp, microbatches=microbatches, stages_per_rank=stages_per_rank
        )
    except ConfigError as error:
        # The rules name the keys of a file, and this command has options.
        raise ConfigError(
            *(replace(p, field=_OPTION_OF_KEY.get(p.field, p.field)) for p in error.problems)
        ) from None
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
