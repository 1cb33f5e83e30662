"""A configuration with "auto" in it, completed by a search: what it fixes is kept as it is written,
"auto" is chosen.

`read_file` says what a file leaves open and what it fixes, in the fields of a layout; `complete` is
what `plait train` does with it: what is left out has its default. Pure; the caller provides the
cluster.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.config.dialects.examine import Examined, at_path
from plait.config.resolving.degrees import PLANNED
from plait.config.resolving.resolve import Resolved, checked
from plait.config.schema.config import Config
from plait.errors import InputError, Problem, refuse
from plait.planner.calibrate import Calibration
from plait.planner.hardware import Cluster
from plait.planner.job import CONTEXT, RECOMPUTE, SCHEDULES
from plait.planner.models import Model, find_model, from_config
from plait.planner.offers import (
    RECOMPUTE_FIXED,
    RECOMPUTE_INDEX,
    RECOMPUTE_NAMES,
    SCHEDULE_INDEX,
    SCHEDULE_NAMES,
)
from plait.planner.output import config_of
from plait.planner.request import Request
from plait.planner.search import Plan, plan

FIELDS: dict[str, tuple[str, Any]] = {
    "parallel.tp": ("tp", 1),
    "parallel.pp": ("pp", 1),
    "parallel.sequence_parallel": ("sp", False),
    "parallel.cp": ("cp", 1),
    "parallel.ep": ("ep", 1),
    "parallel.dp_replicate": ("dp_replicate", "auto"),
    "parallel.dp_shard": ("dp_shard", "auto"),
    "parallel.recompute.mode": ("recompute", "none"),
    "zero_optimization.stage": ("stage", 0),
    "train_micro_batch_size_per_gpu": ("micro_batch", "auto"),
    "gradient_accumulation_steps": ("accumulation", "auto"),
}
"""Path in a file to the field of a layout, and what it means to leave the path out. Any of them may
say "auto".
"""

DETAILS: dict[str, tuple[str, str]] = {
    "parallel.pipeline.schedule": ("schedule", "parallel.pp"),
    "parallel.pipeline.stages_per_rank": ("vpp", "parallel.pp"),
    "parallel.context": ("context", "parallel.cp"),
    "parallel.recompute.every": ("every", "parallel.recompute.mode"),
    "parallel.loss_chunk_tokens": ("loss_chunk", "parallel.recompute.mode"),
    "zero_optimization.offload_optimizer.device": ("offload", "zero_optimization.stage"),
}
"""Path in a file to the field of a layout, and the path of which it is a detail: left out, it is
chosen where that one is.
"""

PATHS = {name: path for path, (name, _) in (FIELDS | DETAILS).items()}
"""The other way round: the field of a layout to its path in a file."""

_SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class File:
    """A configuration to plan for."""

    raw: Mapping[str, Any]
    """As it is written, with the overrides of the command line."""
    tree: Mapping[str, Any]
    """The same settings under the schema's names."""
    config: Config
    """The same without what a search answers."""


def asks(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """The paths that say "auto" and that a search can answer."""
    return tuple(path for path in FIELDS if at_path(tree, path) == "auto")


def searched(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """The paths that say "auto" and that nothing but a search answers."""
    open_sizes = [path for path in _SIZES if at_path(tree, path) == "auto"]
    # one from the other and the whole batch
    follows = len(open_sizes) < 2 and all(at_path(tree, path) is not None for path in _SIZES)
    given = (
        isinstance(at_path(tree, "train_batch_size"), int | float | str)
        and at_path(tree, "train_batch_size") != "auto"
    )
    return tuple(
        path
        for path in asks(tree)
        if path in PLANNED or (path in open_sizes and given and not follows)
    )


def read_file(found: Examined) -> File:
    """What was looked up of a file, as something to plan for. Raises ConfigError with every problem
    but what a search answers.
    """
    return File(found.raw, found.tree, checked(found, _without(found.tree, asks(found.tree))))


def complete(
    file: File, *, cluster: Cluster, calibration: Calibration | None = None
) -> tuple[dict[str, Any], Plan]:
    """(the configuration with nothing of the layout left open, the plan it comes from).

    Raises ConfigError where the file has no model or no batch to plan for, or fixes what cannot be,
    and InputError where nothing fits.
    """
    request = request_of(file, cluster)
    found = plan(
        request, fixed=_meant(fixed_by(file) | _defaults(file)), calibration=calibration, best=1
    )
    if not found.best:
        least = min(found.shortages, key=lambda shortage: shortage.needed, default=None)
        why = f"{least.region} {least}" if least else "no layout fits with enough certainty"
        raise InputError(
            f'"auto": nothing fits on {cluster}: {why}; use more or larger GPUs, or fix less'
        )
    return config_of(request, found.best[0], file.raw), found


def request_of(file: File, cluster: Cluster) -> Request:
    """What is planned for a file. Raises ConfigError where it does not say enough."""
    config = file.config
    problems = []
    batch = config.train_batch_size
    section = config.model
    if not isinstance(batch, int):
        problems.append(
            Problem(
                "train_batch_size",
                batch,
                'what "auto" is planned for',
                "give the samples of an optimizer step",
            )
        )
    if section is None:
        problems.append(
            Problem("model", None, 'what "auto" is planned for', "give model.config or model.path")
        )
    for name in ("bf16", "fp16"):
        if getattr(config, name).enabled == "auto" and True not in (
            config.bf16.enabled,
            config.fp16.enabled,
        ):
            rule = "is a command line's choice (Transformers' --bf16 or --fp16), and none is here"
            problems.append(Problem(f"{name}.enabled", "auto", rule, "write true or false"))
    refuse(problems)
    assert isinstance(batch, int)
    model = model_of(config)
    assert model is not None
    sequence = config.data.sequence_length if config.data is not None else 256
    return with_settings_of(
        config, Request(model, cluster, batch, sequence, precision_of(config) or "fp32")
    )


def model_of(config: Config) -> Model | None:
    """The model that a file describes or names, by its section as it is written; None where it has
    none.
    """
    section = config.model
    if section is None:
        return None
    written = section.model_dump(exclude_unset=True)
    if section.config is not None:
        vocab = config.data.vocab_size if config.data is not None else 8192
        return Model(from_config(section.config, source="model.config", vocab=vocab), written)
    assert section.path is not None
    return Model(find_model(section.path).architecture, written)


def precision_of(config: Config) -> str | None:
    """bf16, fp16 or fp32, as a file says; None where it leaves the choice to its caller
    ("auto").
    """
    found = next((name for name in ("bf16", "fp16") if getattr(config, name).enabled is True), None)
    return found or (None if "auto" in (config.bf16.enabled, config.fp16.enabled) else "fp32")


def with_settings_of(config: Config, request: Request) -> Request:
    """`request` with the settings of a file besides the layout that the planner models:
    compilation, the dtype of the Adam moments, the reduction's dtype.
    """
    states = config.optimizer.states if config.optimizer is not None else request.optimizer_states
    reduce = config.communication_data_type or request.precision
    return replace(
        request,
        compile=request.compile or config.compile.enabled is True,
        optimizer_states=states,
        reduce=reduce,
    )


def fixed_by(file: File) -> dict[str, int]:
    """The fields of a layout that a file gives a value. Raises ConfigError for a value that no plan
    can keep.
    """
    fixed: dict[str, int] = {}
    config = file.config
    problems = []
    for path, (name, _) in FIELDS.items():
        value = config.value(path)
        if at_path(file.tree, path) in (None, "auto") or value in (None, "auto"):
            continue
        if name == "recompute":
            if value not in RECOMPUTE_FIXED:
                problems.append(
                    Problem(
                        path,
                        value,
                        "not a mode that a plan can keep",
                        f'use "auto" or {", ".join(RECOMPUTE_FIXED)}',
                    )
                )
                continue
            value = RECOMPUTE_INDEX[value]
        fixed[name] = int(value)
    if (
        config.parallel.recompute.budget_gib is not None
        and config.parallel.recompute.mode != "budget"
    ):
        rule = "a plan prices no budget, and a mode that is fixed has none"
        problems.append(
            Problem(
                "parallel.recompute.budget_gib",
                config.parallel.recompute.budget_gib,
                rule,
                "leave it out",
            )
        )
    problems += _fix_details(config, fixed)
    refuse(problems)
    return fixed


def _fix_details(config: Config, fixed: dict[str, int]) -> list[Problem]:
    pipeline = config.parallel.pipeline
    offload = config.zero_optimization.offload_optimizer
    problems = []
    several = fixed.get("pp") != 1
    if pipeline.schedule is not None and several:
        if pipeline.schedule in SCHEDULE_INDEX:
            fixed["schedule"] = SCHEDULE_INDEX[pipeline.schedule]
        else:
            rule = "not a schedule that a plan prices"
            problems.append(
                Problem(
                    "parallel.pipeline.schedule",
                    pipeline.schedule,
                    rule,
                    f"use {', '.join(SCHEDULE_INDEX)}",
                )
            )
    if pipeline.stages_per_rank is not None and several:
        fixed["vpp"] = pipeline.stages_per_rank
    if pipeline.blocks_per_stage is not None and "pp" not in fixed:
        rule = "it fixes the stages, which parallel.pp leaves open"
        problems.append(
            Problem(
                "parallel.pipeline.blocks_per_stage",
                None,
                rule,
                "give parallel.pp, or leave it out",
            )
        )
    if "context" in config.parallel.model_fields_set and fixed.get("cp") != 1:
        fixed["context"] = CONTEXT.index(config.parallel.context)
    if "loss_chunk_tokens" in config.parallel.model_fields_set:
        fixed["loss_chunk"] = config.parallel.loss_chunk_tokens
    if "every" in config.parallel.recompute.model_fields_set and fixed.get(
        "recompute"
    ) != RECOMPUTE.index("none"):
        fixed["every"] = config.parallel.recompute.every
    if "device" in offload.model_fields_set:
        fixed["offload"] = round(100 * offload.ratio) if offload.device != "none" else 0
    return problems


def _defaults(file: File) -> dict[str, int]:
    """What a file leaves out has its default, but for the details of what it leaves open."""
    found = {
        name: default
        for path, (name, default) in FIELDS.items()
        if at_path(file.tree, path) is None and default != "auto"
    }
    if found.get("recompute") is not None:
        found["recompute"] = RECOMPUTE.index("none")
    open_paths = asks(file.tree)
    plain = {
        "schedule": SCHEDULES.index("1f1b"),
        "vpp": 1,
        "context": 0,
        "every": 1,
        "loss_chunk": 0,
        "offload": 0,
    }
    fixed = fixed_by(file)
    for name, owner in DETAILS.values():
        if name not in fixed and owner not in open_paths:
            found[name] = plain[name]
    if fixed.get("vpp", 1) > 1 and "schedule" not in fixed:
        found["schedule"] = SCHEDULES.index("interleaved")
    elif "schedule" in fixed and "vpp" not in fixed:
        found.pop("vpp", None)  # the schedule's own number
    return {name: int(value) for name, value in found.items()}


def _meant(fixed: Mapping[str, int]) -> dict[str, int]:
    """`fixed` without the details of a pipeline, of parts of sequences and of recomputation where
    there is none, which `plait train` leaves unused.
    """
    unused = {"schedule", "vpp"} if fixed.get("pp") == 1 else set()
    unused |= {"context"} if fixed.get("cp") == 1 else set()
    unused |= {"every"} if fixed.get("recompute") == RECOMPUTE.index("none") else set()
    return {name: value for name, value in fixed.items() if name not in unused}


def _without(tree: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """A copy in which some paths are left out."""
    whole = copy.deepcopy(dict(tree))
    for path in paths:
        *sections, name = path.split(".")
        here = whole
        for section in sections:
            here = here[section]
        del here[name]
    return whole


def layout_of(resolved: Resolved) -> dict[str, Any]:
    """The fields of a layout that a resolved configuration has. A schedule and a recomputation that
    are priced have the planner's names for them; `vpp` is left out where the file does not say it.
    """
    at = resolved.layout
    pipeline = resolved.pipeline
    schedules, modes = (
        {name: priced for priced, name in names.items()}
        for names in (SCHEDULE_NAMES, RECOMPUTE_NAMES)
    )
    several = at.pp > 1
    found = {
        "pp": at.pp,
        "schedule": (
            schedules.get(pipeline.schedule, pipeline.schedule) if several else SCHEDULES[0]
        ),
        "tp": at.tp,
        "sp": int(resolved.tensor_parallel.sequence_parallel),
        "cp": at.cp,
        "context": CONTEXT.index(resolved.context_parallel.context),
        "ep": at.ep,
        "dp_replicate": at.dp_replicate,
        "dp_shard": at.dp_shard,
        "stage": resolved.data_parallel.stage,
        "recompute": modes.get(resolved.recompute.mode, resolved.recompute.mode),
        "every": resolved.recompute.every,
        "loss_chunk": resolved.loss_chunk_tokens,
        "micro_batch": resolved.batch.micro_batch_size,
        "accumulation": resolved.batch.accumulation,
        "offload": (
            resolved.optimizer_offload.ratio if resolved.optimizer_offload.device != "none" else 0.0
        ),
    }
    return found | (
        {"vpp": pipeline.stages_per_rank}
        if several and pipeline.stages_per_rank is not None
        else {}
    )
