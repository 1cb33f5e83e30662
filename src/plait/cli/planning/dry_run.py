"""Dry run of one rank of a planned layout, compared with the planner's prediction.

The engine builds and steps the rank without the other ranks. With fake tensors this needs no memory
and no GPU, and the planner predicts for the type of device that this machine has. On a GPU
(`--on-device`) kernels run, and time and memory are measured.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from plait.cli.terminal import print_table
from plait.cluster import accelerator
from plait.config.resolving.resolve import Resolved, load, resolve
from plait.config.schema.sections import DataSection
from plait.engine.single_rank import SingleRankRun, run_single_rank
from plait.errors import ConfigError, InputError, Problem, first_line
from plait.model.described import require_transformers
from plait.names import did_you_mean
from plait.parallel.schedules.schedule import SCHEDULES as TABLES
from plait.planner.configuration import layout_of as planned_layout
from plait.planner.constants import fitted_priors
from plait.planner.hardware import device, only
from plait.planner.job import RECOMPUTE, SCHEDULES, Layouts
from plait.planner.memory import MOMENTS, memory_bytes
from plait.planner.request import Request, job_of, states_of
from plait.planner.techniques import RECOMPUTE_FIXED, SCHEDULE_INDEX
from plait.sizes import GIB, dtype_of, format_bytes, format_count
from plait.verify.model_under_test import transformers_model

_SHOWN_OPERATORS = 10


@dataclass(frozen=True)
class DryRun:
    """Measurements of a dry run, and the planner's prediction for the same rank."""

    rank: int
    world_size: int
    stage: str
    """Position of the rank in the pipeline, for the user."""
    measured: SingleRankRun
    predicted: Mapping[str, float]
    """Predicted bytes of `parameters`, `optimizer` and `peak`.

    Empty if the planner does not model this rank.
    """
    moment: str
    """Point of the step at which the peak is predicted."""
    micro_batches_run: int
    """Number of micro-batches of the step that was run."""
    accumulation: int
    """Number of micro-batches of the planned step."""
    notes: tuple[str, ...]

    def rows(self) -> list[tuple[str, float | None, float, float | None]]:
        """Return (name, prediction, measurement, prediction / measurement) per kind of memory."""
        measurements = {
            "parameters": self.measured.parameters,
            "optimizer": self.measured.optimizer,
            "peak": self.measured.peak,
        }
        rows = []
        for name, measured in measurements.items():
            predicted = self.predicted.get(name)
            ratio = None
            if predicted is not None and measured:
                ratio = predicted / measured
            rows.append((name, predicted, float(measured), ratio))
        return rows

    def as_json(self) -> dict[str, Any]:
        """Return the measurements and predictions as plain values."""
        sizes = {
            name: {"predicted": predicted, "dry_run": measured, "ratio": ratio}
            for name, predicted, measured, ratio in self.rows()
        }
        sizes["gradients"] = {"predicted": None, "dry_run": self.measured.gradients, "ratio": None}
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "stage": self.stage,
            "device": self.measured.device,
            "bytes": sizes,
            "peak_predicted_during": self.moment,
            "peak_during": self.measured.peak_during,
            "micro_batches_run": self.micro_batches_run,
            "micro_batches_of_a_step": self.accumulation,
            "flops": self.measured.flops,
            "operators": [asdict(operator) for operator in self.measured.operators],
            "traffic": [asdict(collective) for collective in self.measured.traffic],
            "build_seconds": self.measured.build_seconds,
            "step_seconds": self.measured.step_seconds,
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
    """Run one rank of a configuration without the other ranks.

    Args:
        request: Request of the plan, with the number of devices.
        tree: The configuration.
        rank: Rank to run. None for the one that is predicted to need the most memory.
        full_step: Whether to run all micro-batches, not only as many as reach the peak.
        on_device: Whether to run the kernels on this machine's GPU, not on fake tensors.
        quiet: Whether to print no progress to standard error.

    Raises:
        ConfigError: The configuration or the rank is not valid.
        InputError: Transformers cannot build the model.
        ModelError: The configuration cannot be applied to the model.
    """
    world = request.cluster.devices
    full = resolve(load(dict(tree)), world_size=world)
    pp = full.layout.pp
    if rank is not None and not 0 <= rank < world:
        raise ConfigError(
            Problem("--rank", rank, f"the layout has ranks 0 to {world - 1:,}", "pass one of them")
        )
    notes = []
    layout, reason = layout_of(full)
    if layout is None:
        notes.append(f"no memory is predicted: {reason}")
    rank_is_chosen = rank is None
    if rank is None:
        rank = 0
        if layout is not None:
            rank = _fullest_rank(request, layout, world, pp)
    pp_rank = full.layout.coordinates(rank)["pp"]
    stage = "the only stage" if pp == 1 else f"rank {pp_rank} of {pp} in the pipeline"
    predicted: dict[str, float] = {}
    moment = ""
    if layout is not None and pp_rank in (0, pp - 1):
        predicted, moment = _predict(
            request, layout, last=pp_rank == pp - 1 and pp > 1, on_device=on_device
        )
    elif layout is not None:
        notes.append(
            "no memory is predicted: the planner models the first and the last rank of a pipeline,"
            " and this one is between them"
        )

    count = full.batch.accumulation
    micro_batches_run = count if full_step else _micro_batches_to_peak(full)
    resolved = full
    if micro_batches_run < count:
        shorter = copy.deepcopy(dict(tree))
        samples = micro_batches_run * full.batch.micro_batch_size * full.layout.dp
        # Both keys, because they must agree with the micro-batch size.
        shorter["gradient_accumulation_steps"] = micro_batches_run
        shorter["train_batch_size"] = samples
        resolved = resolve(load(shorter), world_size=world)
        notes.append(
            f"{micro_batches_run} of the step's {count} micro-batches were run, enough for its"
            " peak; operators and traffic are those of the micro-batches that were run (--full-step"
            " runs all)"
        )
    model = _build_model(tree, full.data)
    if rank_is_chosen and pp > 1:
        notes.append(
            f"rank {rank:,} is predicted to need the most memory; choose another with --rank"
        )
    started = time.perf_counter()

    def print_phase(phase: str) -> None:
        if not quiet:
            print(
                f"plait: dry run, {time.perf_counter() - started:.0f} s: {phase}",
                file=sys.stderr,
                flush=True,
            )

    run = run_single_rank(
        model,
        resolved,
        rank=rank,
        samples=full.batch.micro_batch_size,
        length=request.sequence,
        real=on_device,
        on_phase=print_phase,
    )
    return DryRun(
        rank=rank,
        world_size=world,
        stage=stage,
        measured=run,
        predicted=predicted,
        moment=moment,
        micro_batches_run=micro_batches_run,
        accumulation=count,
        notes=tuple(notes),
    )


def layout_of(resolved: Resolved) -> tuple[dict[str, Any] | None, str]:
    """Return (the planner's layout fields, "") for a resolved configuration.

    If the planner does not model a setting, the result is (None, reason).
    """
    layout = resolved.layout
    pipeline = resolved.pipeline
    if resolved.recompute.mode not in RECOMPUTE_FIXED:
        return None, f"the planner does not model the recomputation {resolved.recompute.mode}"
    if resolved.activation_offload.fraction > 0:
        return None, "the planner does not model activations on the host"
    if resolved.parameter_offload.device == "nvme":
        return None, "the planner does not model parameters in files"
    if layout.pp > 1 and pipeline.schedule not in SCHEDULE_INDEX:
        return None, f"the planner does not model the schedule {pipeline.schedule}"
    if resolved.optimizer.type not in ("Adam", "AdamW"):
        return None, "the planner models AdamW"

    fields = dict(planned_layout(resolved))
    fields["schedule"] = SCHEDULES.index(fields["schedule"])
    fields["recompute"] = RECOMPUTE.index(fields["recompute"])
    fields["sp"] = int(fields["sp"] and layout.tp > 1)
    fields["vpp"] = 1
    if layout.pp > 1:
        fields["vpp"] = pipeline.stages_per_rank or TABLES[pipeline.schedule].stages_per_rank[0]
    return fields, ""


def _micro_batches_to_peak(resolved: Resolved) -> int:
    """Return the number of micro-batches after which the memory of a step has reached its peak.

    Without a pipeline this is two, and with a pipeline twice the number of pipeline ranks. For a
    schedule that has all micro-batches in flight, it is the number of accumulation steps.
    """
    count = resolved.batch.accumulation
    pp = resolved.layout.pp
    # The second micro-batch finds the gradients of the first.
    if pp == 1:
        return min(count, 2)
    # These schedules have all micro-batches in flight.
    if resolved.pipeline.schedule in ("gpipe", "looped-bfs"):
        return count
    return min(count, 2 * pp)


def _job_and_states(
    request: Request, layout: Mapping[str, Any], *, on_device: bool
) -> tuple[Any, Any]:
    """Return the planner's (job, model states) for the device type of the dry run."""
    if accelerator.available_type() == "cpu" and not on_device:
        family = device("cpu").family
        cluster = replace(request.cluster, device=replace(request.cluster.device, family=family))
        request = replace(request, cluster=cluster)
    job = job_of(request, Layouts.of([layout]))
    return job, states_of(request, job)


def _peak(job: Any, states: Any, *, last: bool) -> tuple[float, str]:
    """Return (predicted peak, its point in the step) for the first or last pipeline rank."""
    pipeline_rank = "last" if last else "first"
    memory = memory_bytes(job, fitted_priors().rates, states, ranks=(pipeline_rank,))
    return only(memory.allocated), MOMENTS[int(only(memory.moment))]


def _fullest_rank(request: Request, layout: Mapping[str, Any], world: int, pp: int) -> int:
    """Return the first rank of the first or last pipeline stage, whichever needs more memory."""
    if pp == 1:
        return 0
    job, states = _job_and_states(request, layout, on_device=False)
    first, _ = _peak(job, states, last=False)
    last, _ = _peak(job, states, last=True)
    if first >= last:
        return 0
    return world // pp * (pp - 1)


def _predict(
    request: Request, layout: Mapping[str, Any], *, last: bool, on_device: bool
) -> tuple[dict[str, float], str]:
    job, states = _job_and_states(request, layout, on_device=on_device)
    peak, moment = _peak(job, states, last=last)
    model_states = states.last if last else states.first
    predicted = {
        "parameters": only(model_states["weights"]),
        "optimizer": only(model_states["optimizer"]),
        "peak": peak,
    }
    return predicted, moment


def _model_fields(tree: Mapping[str, Any]) -> dict[str, Any]:
    section = tree.get("model") or {}
    if section.get("config"):
        return dict(section["config"])
    path = Path(str(section.get("path"))) / "config.json"
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"plait dryrun: {path} cannot be read ({error}); pass model.config, or a folder with a"
            " config.json"
        ) from None
    return fields


def _build_model(tree: Mapping[str, Any], data: DataSection | None) -> Any:
    """Build the model with Transformers on the meta device."""
    require_transformers("plait dryrun")
    from transformers import CONFIG_MAPPING

    fields = _model_fields(tree)
    vocabulary = data.trained_vocabulary() if data is not None else None
    # The vocabulary that training gives a model without one, and that the plan counts.
    if vocabulary is not None and fields.get("vocab_size") is None:
        fields["vocab_size"] = vocabulary
    kind = fields.get("model_type")
    if kind not in CONFIG_MAPPING:
        hint = did_you_mean(str(kind), CONFIG_MAPPING, count=3)
        raise InputError(
            f"plait dryrun: Transformers has no model {kind!r} in this version; {hint}use"
            " `plait plan`, which does not need the code of the model"
        )
    try:
        return transformers_model(
            fields, dtype=dtype_of((tree.get("model") or {}).get("dtype", "float32"))
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"plait dryrun: Transformers builds no causal language model of model_type {kind!r}"
            f" ({first_line(error)}); name another model_type, or correct its fields"
        ) from None


def print_dry_run(run: DryRun) -> None:
    """Print the memory next to the prediction, the traffic by axis, and the largest operators.

    The largest operators are those with the most FLOPs, or on a device those that take longest.
    """
    console = Console(soft_wrap=True, highlight=False)
    measured_run = run.measured
    print(
        f"dry run of rank {run.rank:,} of {run.world_size:,}, {run.stage}, on {measured_run.device}"
    )
    table = []
    for name, predicted, measured, ratio in run.rows():
        predicted_text = "-"
        ratio_text = "-"
        if predicted is not None:
            predicted_text = f"{predicted / GIB:.3f} GiB"
        if ratio is not None:
            ratio_text = f"{ratio:.3f}"
        table.append([name, predicted_text, f"{measured / GIB:.3f} GiB", ratio_text])
    table.insert(1, ["gradients", "-", f"{measured_run.gradients / GIB:.3f} GiB", "-"])
    print_table(console, ("memory", "predicted", "dry run", "ratio"), table)
    predicted_moment = ""
    if run.moment:
        predicted_moment = f" (predicted: {run.moment})"
    print(f"the peak occurred in {measured_run.peak_during}{predicted_moment}")

    traffic = [
        [t.axis, t.kind, str(t.ranks), f"{t.calls:,}", format_bytes(t.wire_bytes)]
        for t in measured_run.traffic
    ]
    print_table(console, ("axis", "collective", "ranks", "calls", "sent by this rank"), traffic)

    shown = measured_run.operators[:_SHOWN_OPERATORS]
    columns = ["operator", "calls", "FLOPs"]
    # Fake tensors take no time.
    has_times = any(operator.device_seconds for operator in shown)
    if has_times:
        columns.append("time")
    rows = []
    for operator in shown:
        flops = format_count(float(operator.flops)) if operator.flops else "-"
        row = [operator.name, f"{operator.calls:,}", flops]
        if has_times:
            seconds = operator.device_seconds
            row.append(f"{seconds * 1e3:.3g} ms" if seconds else "")
        rows.append(row)
    print_table(console, columns, rows)
    print(
        f"{measured_run.flops:.4g} FLOPs; built in {measured_run.build_seconds:.1f} s, stepped in"
        f" {measured_run.step_seconds:.1f} s"
    )
    for note in run.notes:
        print(f"note: {note}")
