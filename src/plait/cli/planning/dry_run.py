"""`plait dryrun`: one rank of a planned layout, built by the engine itself and stepped without its
peers, against the prediction.

On fake tensors it runs anywhere and holds nothing; the memory is then predicted for the operators
of the device type that stands there. On a GPU (`--on-device`) kernels run and time and memory are
the device's.
"""

from __future__ import annotations

import copy
import difflib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from plait.cli.planning.tables import print_table
from plait.cluster import accelerator
from plait.config.resolving.resolve import Resolved, load, resolve
from plait.engine.single_rank import SingleRankRun, run_single_rank
from plait.errors import ConfigError, InputError, Problem, first_line
from plait.model.described import require_transformers
from plait.parallel.schedules.schedule import SCHEDULES as TABLES
from plait.planner.auto import layout_of as planned_layout
from plait.planner.constants import knowledge
from plait.planner.hardware import device, only
from plait.planner.job import RECOMPUTE, SCHEDULES, Layouts
from plait.planner.memory import MOMENTS, memory_bytes
from plait.planner.offers import RECOMPUTE_FIXED, SCHEDULE_INDEX
from plait.planner.request import Request, job_of, states_of
from plait.units import GIB, dtype_of, format_bytes, format_count
from plait.verify.model_under_test import transformers_model


@dataclass(frozen=True)
class DryRun:
    """What was run, what it held and what had been predicted."""

    rank: int
    world_size: int
    stage: str
    """Where in the pipeline the rank is."""
    found: SingleRankRun
    predicted: Mapping[str, float]
    """Bytes by the names of `found`: parameters, optimizer, peak. Empty where the planner prices no
    such rank.
    """
    moment: str
    micro_batches_run: int
    """Micro-batches of the step that was run."""
    accumulation: int
    """Micro-batches of the planned step."""
    notes: tuple[str, ...]

    def rows(self) -> list[tuple[str, float | None, float, float | None]]:
        """(what, predicted, dry run, predicted / dry run)."""
        found = {
            "parameters": self.found.parameters,
            "optimizer": self.found.optimizer,
            "peak": self.found.peak,
        }
        rows = []
        for name, measured in found.items():
            told = self.predicted.get(name)
            rows.append(
                (
                    name,
                    told,
                    float(measured),
                    told / measured if told is not None and measured else None,
                )
            )
        return rows

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "stage": self.stage,
            "device": self.found.device,
            "bytes": (
                {n: {"predicted": p, "dry_run": m, "ratio": r} for n, p, m, r in self.rows()}
                | {"gradients": {"predicted": None, "dry_run": self.found.gradients, "ratio": None}}
            ),
            "peak_predicted_during": self.moment,
            "peak_during": self.found.peak_during,
            "micro_batches_run": self.micro_batches_run,
            "micro_batches_of_a_step": self.accumulation,
            "flops": self.found.flops,
            "operators": [asdict(operator) for operator in self.found.operators],
            "traffic": [asdict(sent) for sent in self.found.traffic],
            "build_seconds": self.found.build_seconds,
            "step_seconds": self.found.step_seconds,
            "notes": list(self.notes),
        }


def dry_run(
    request: Request,
    tree: Mapping[str, Any],
    *,
    rank: int | None = None,
    full_step: bool = False,
    on_device: bool = False,
    quiet: bool = False,
) -> DryRun:
    """Run a rank of the configuration `tree` on as many devices as `request` has. Raises
    ConfigError, InputError or ModelError for what does not run.
    """
    world = request.cluster.devices
    full = resolve(load(dict(tree)), world_size=world)
    pp = full.layout.pp
    if rank is not None and not 0 <= rank < world:
        raise ConfigError(
            Problem("--rank", rank, f"the layout has ranks 0 to {world - 1:,}", "give one of them")
        )
    notes = []
    layout, why = layout_of(full)
    if layout is None:
        notes.append(f"no memory is predicted: {why}")
    asked = rank
    if rank is None:
        rank = _fullest(request, layout, world, pp) if layout is not None else 0
    at = full.layout.coordinates(rank)["pp"]
    stage = "the only stage" if pp == 1 else f"rank {at} of {pp} in the pipeline"
    predicted: dict[str, float] = {}
    moment = ""
    if layout is not None and at in (0, pp - 1):
        predicted, moment = _predicted(
            request, layout, last=at == pp - 1 and pp > 1, on_device=on_device
        )
    elif layout is not None:
        notes.append(
            "no memory is predicted: the planner prices the first and the last rank of a pipeline,"
            " and this one is between"
        )
    count = full.batch.accumulation
    micro_batches_run = count if full_step else _enough(full)
    resolved = full
    if micro_batches_run < count:
        fewer = copy.deepcopy(dict(tree))
        fewer["gradient_accumulation_steps"] = micro_batches_run
        fewer["train_batch_size"] = micro_batches_run * full.batch.micro_batch_size * full.layout.dp
        resolved = resolve(load(fewer), world_size=world)
        notes.append(
            f"{micro_batches_run} of the step's {count} micro-batches were run, enough for its"
            " peak; operators and traffic are of those (--full-step runs all)"
        )
    model = _model(tree)
    if asked is None and pp > 1:
        notes.append(
            f"rank {rank:,} is predicted to need the most memory; choose another with --rank"
        )
    began = time.perf_counter()

    def tell(what: str) -> None:
        if not quiet:
            print(
                f"plait: dry run, {time.perf_counter() - began:.0f} s: {what}",
                file=sys.stderr,
                flush=True,
            )

    found = run_single_rank(
        model,
        resolved,
        rank=rank,
        samples=full.batch.micro_batch_size,
        length=request.sequence,
        real=on_device,
        tell=tell,
    )
    return DryRun(
        rank, world, stage, found, predicted, moment, micro_batches_run, count, tuple(notes)
    )


def layout_of(resolved: Resolved) -> tuple[dict[str, Any] | None, str]:
    """The planner's fields of a resolved configuration; None with the reason where it has none for
    something of it.
    """
    at = resolved.layout
    recompute = resolved.recompute
    pipeline = resolved.pipeline
    if recompute.mode not in RECOMPUTE_FIXED:
        return None, f"the planner does not price the recomputation {recompute.mode}"
    if resolved.activation_offload.fraction > 0:
        return None, "the planner prices no activations on the host"
    if resolved.parameter_offload.device == "nvme":
        return None, "the planner prices no parameters in files"
    if at.pp > 1 and pipeline.schedule not in SCHEDULE_INDEX:
        return None, f"the planner does not price the schedule {pipeline.schedule}"
    if resolved.optimizer.type not in ("Adam", "AdamW"):
        return None, "the planner models AdamW"
    chunks = (
        1
        if at.pp == 1
        else pipeline.stages_per_rank or TABLES[pipeline.schedule].stages_per_rank[0]
    )
    found = planned_layout(resolved)
    schedule = SCHEDULES.index(found["schedule"])
    kind = RECOMPUTE.index(found["recompute"])
    return (
        found
        | {
            "schedule": schedule,
            "recompute": kind,
            "vpp": chunks,
            "sp": int(found["sp"] and at.tp > 1),
        },
        "",
    )


def _enough(resolved: Resolved) -> int:
    """Micro-batches with which the peak of a step is reached: as many again as a pipeline has in
    flight, all where all are in flight.
    """
    count = resolved.batch.accumulation
    pp = resolved.layout.pp
    if pp == 1:
        return min(count, 2)
    return (
        count
        if resolved.pipeline.schedule in ("gpipe", "looped-bfs") or count <= 2 * pp
        else 2 * pp
    )


def _priced(request: Request, layout: Mapping[str, Any], *, on_device: bool) -> tuple[Any, Any]:
    """(job, states) for the operators of the device type that the dry run runs on."""
    if accelerator.available_type() == "cpu" and not on_device:
        family = device("cpu").family
        cluster = replace(request.cluster, device=replace(request.cluster.device, family=family))
        request = replace(request, cluster=cluster)
    job = job_of(request, Layouts.of([layout]))
    return job, states_of(request, job)


def _memory(job: Any, states: Any, *, last: bool) -> tuple[float, str]:
    memory = memory_bytes(job, knowledge().rates, states, ranks=("last",) if last else ("first",))
    return only(memory.allocated), MOMENTS[int(only(memory.moment))]


def _fullest(request: Request, layout: Mapping[str, Any], world: int, pp: int) -> int:
    """The first rank of the first or of the last stage."""
    if pp == 1:
        return 0
    job, states = _priced(request, layout, on_device=False)
    return (
        0
        if _memory(job, states, last=False)[0] >= _memory(job, states, last=True)[0]
        else world // pp * (pp - 1)
    )


def _predicted(
    request: Request, layout: Mapping[str, Any], *, last: bool, on_device: bool
) -> tuple[dict[str, float], str]:
    job, states = _priced(request, layout, on_device=on_device)
    peak, moment = _memory(job, states, last=last)
    held = states.last if last else states.first
    return {
        "parameters": only(held["weights"]),
        "optimizer": only(held["optimizer"]),
        "peak": peak,
    }, moment


def _fields(tree: Mapping[str, Any]) -> dict[str, Any]:
    section = tree.get("model") or {}
    if section.get("config"):
        return dict(section["config"])
    path = Path(str(section.get("path"))) / "config.json"
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"plait dryrun: {path} cannot be read ({error}); give model.config, or a folder with a"
            " config.json"
        ) from None
    return fields


def _model(tree: Mapping[str, Any]) -> Any:
    """The model on meta, by Transformers."""
    require_transformers("plait dryrun")
    from transformers import CONFIG_MAPPING

    fields = _fields(tree)
    kind = fields.get("model_type")
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING), n=3)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise InputError(
            f"plait dryrun: Transformers has no model {kind!r} in this version; {hint}the plan"
            " itself needs no such code"
        )
    try:
        return transformers_model(
            fields, dtype=dtype_of((tree.get("model") or {}).get("dtype", "float32"))
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"plait dryrun: Transformers builds no causal language model of model_type {kind!r}"
            f" ({first_line(error)})"
        ) from None


def print_dry_run(run: DryRun, *, operators: int) -> None:
    """Memory against the prediction, traffic by axis, the operators with the most FLOPs (on a
    device: the longest).
    """
    console = Console(soft_wrap=True, highlight=False)
    found = run.found
    print(f"dry run of rank {run.rank:,} of {run.world_size:,}, {run.stage}, on {found.device}")
    table = [
        [
            name,
            f"{told / GIB:.3f} GiB" if told is not None else "-",
            f"{got / GIB:.3f} GiB",
            f"{ratio:.3f}" if ratio is not None else "-",
        ]
        for name, told, got, ratio in run.rows()
    ]
    table.insert(1, ["gradients", "-", f"{found.gradients / GIB:.3f} GiB", "-"])
    print_table(console, ("memory", "predicted", "dry run", "ratio"), table)
    said = f" (predicted: {run.moment})" if run.moment else ""
    print(f"the peak came in {found.peak_during}{said}")
    traffic = [
        [s.axis, s.kind, str(s.ranks), f"{s.calls:,}", format_bytes(s.wire_bytes)]
        for s in found.traffic
    ]
    print_table(console, ("axis", "collective", "ranks", "calls", "sent by this rank"), traffic)
    rows = [
        [o.name, f"{o.calls:,}", format_count(float(o.flops)) if o.flops else "-"]
        + ([f"{o.device_seconds * 1e3:.3g} ms"] if o.device_seconds else [])
        for o in found.operators[:operators]
    ]
    timed = ("time",) if any(o.device_seconds for o in found.operators[:operators]) else ()
    print_table(
        console,
        ("operator", "calls", "FLOPs", *timed),
        [row + [""] * (3 + len(timed) - len(row)) for row in rows],
    )
    print(
        f"{found.flops:.4g} FLOPs; built in {found.build_seconds:.1f} s, stepped in"
        f" {found.step_seconds:.1f} s"
    )
    for note in run.notes:
        print(f"note: {note}")
