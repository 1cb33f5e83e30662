"""Conversion of configurations to plan requests, and replacement of "auto" by the search.

Values in the file are fixed, and the search chooses the options that are "auto". `read_file`
separates fixed values from searched options, and `complete` returns the configuration with the
chosen values, as `plait train` uses it. Omitted options have their defaults. The caller provides
the cluster.

`unmodelled` lists settings that affect time or memory but are not modelled. Runs with such settings
are not used for calibration. Settings in `MODELLED` are modelled, and those in `WITHOUT_EFFECT`
hardly matter. Any other setting that differs from its default is unmodelled, so that a new setting
cannot be forgotten.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.config.dialects.examine import ExaminedDocument, value_at
from plait.config.dialects.keys import schema_fields
from plait.config.resolving.resolve import Resolved, validate_tree
from plait.config.resolving.resolved_parts import PLANNABLE_SETTINGS
from plait.config.schema.config import Config
from plait.errors import InputError, Problem, raise_problems
from plait.planner.calibrate import Calibration
from plait.planner.hardware import Cluster
from plait.planner.job import CONTEXT, RECOMPUTE, SCHEDULES
from plait.planner.models import Model, find_model, from_config
from plait.planner.output import config_of
from plait.planner.request import Request
from plait.planner.search import Plan, plan
from plait.planner.techniques import (
    RECOMPUTE_FIXED,
    RECOMPUTE_INDEX,
    RECOMPUTE_NAMES,
    SCHEDULE_INDEX,
    SCHEDULE_NAMES,
)

FIELDS: dict[str, tuple[str, Any]] = {
    "parallel.tp": ("tp", 1),
    "parallel.pp": ("pp", 1),
    "parallel.sequence_parallel": ("sp", False),
    "parallel.cp": ("cp", 1),
    "parallel.ep": ("ep", 1),
    "parallel.dp_replicate": ("dp_replicate", "auto"),
    "parallel.dp_shard": ("dp_shard", "auto"),
    "parallel.recompute.mode": ("recompute", RECOMPUTE.index("none")),
    "zero_optimization.stage": ("stage", 0),
    "train_micro_batch_size_per_gpu": ("micro_batch", "auto"),
    "gradient_accumulation_steps": ("accumulation", "auto"),
}
"""Layout field and its default value per path of a configuration. Each of them may be "auto"."""

DETAILS: dict[str, tuple[str, str]] = {
    "parallel.pipeline.schedule": ("schedule", "parallel.pp"),
    "parallel.pipeline.stages_per_rank": ("vpp", "parallel.pp"),
    "parallel.context": ("context", "parallel.cp"),
    "parallel.recompute.every": ("every", "parallel.recompute.mode"),
    "parallel.loss_chunk_tokens": ("loss_chunk", "parallel.recompute.mode"),
    "zero_optimization.offload_optimizer.device": ("offload", "zero_optimization.stage"),
}
"""(layout field, path of its owner) per path of a configuration.

If the owner is "auto", the search also chooses the values of its details that are left out.
"""

PATHS = {name: path for path, (name, _) in (FIELDS | DETAILS).items()}
"""Path in a configuration per layout field."""

_SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class File:
    """Configuration file of a training run. The planner chooses its "auto" options."""

    raw: Mapping[str, Any]
    """Configuration as written, with the overrides of the command line."""
    tree: Mapping[str, Any]
    """Settings under the schema's names."""
    config: Config
    """Validated configuration without the options that the search chooses."""


def auto_paths(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the paths of the options that are "auto" and that a search can choose."""
    return tuple(path for path in FIELDS if value_at(tree, path) == "auto")


def paths_to_search(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the paths of the options that are "auto" and that need a search.

    A batch size that follows from the other batch sizes needs no search.
    """
    open_sizes = [path for path in _SIZES if value_at(tree, path) == "auto"]

    # With the whole batch, one of the two sizes determines the other.
    follows = len(open_sizes) < 2 and all(value_at(tree, path) is not None for path in _SIZES)
    has_batch = (
        isinstance(value_at(tree, "train_batch_size"), int | float | str)
        and value_at(tree, "train_batch_size") != "auto"
    )
    paths: list[str] = []
    for path in auto_paths(tree):
        if path in PLANNABLE_SETTINGS or (path in open_sizes and has_batch and not follows):
            paths.append(path)
    return tuple(paths)


def read_file(examined: ExaminedDocument) -> File:
    """Validate a configuration file, except for the options that the search chooses.

    Raises:
        ConfigError: The file is invalid. The error lists all problems.
    """
    return File(
        examined.raw,
        examined.tree,
        validate_tree(examined, _without(examined.tree, auto_paths(examined.tree))),
    )


def complete(
    file: File, *, cluster: Cluster, calibration: Calibration | None = None
) -> tuple[dict[str, Any], Plan]:
    """Replace the "auto" options of a configuration by the fastest layout that fits.

    Args:
        file: The configuration.
        cluster: Devices to plan for.
        calibration: Constants of this machine. None uses those of the package.

    Returns:
        The configuration without "auto" in its layout, and the plan.

    Raises:
        ConfigError: The file has no model or batch size, or fixes values that contradict each
            other.
        InputError: No layout fits into memory.
    """
    request = request_of(file, cluster)
    result = plan(
        request,
        fixed=_without_unused_details(fixed_by(file) | _defaults(file)),
        calibration=calibration,
        best=1,
    )
    if not result.best:
        least = min(result.shortages, key=lambda shortage: shortage.needed_bytes, default=None)
        why = f"{least.region} {least}" if least else "no layout fits with enough certainty"
        raise InputError(
            f'"auto": no layout fits on {cluster}: {why}; use more or larger GPUs, or fix fewer'
            " values"
        )

    return config_of(request, result.best[0], file.raw), result


def request_of(file: File, cluster: Cluster) -> Request:
    """Return the plan request for a configuration file.

    Raises:
        ConfigError: The file has no model or no batch size.
    """
    config = file.config
    problems = []
    batch = config.train_batch_size
    if not isinstance(batch, int):
        problems.append(
            Problem(
                "train_batch_size",
                batch,
                'the planner needs the batch size to replace "auto"',
                "set it to the number of samples per optimizer step",
            )
        )

    if config.model is None:
        problems.append(
            Problem(
                "model",
                None,
                'the planner needs the model to replace "auto"',
                "set model.config or model.path",
            )
        )
    for name in ("bf16", "fp16"):
        if getattr(config, name).enabled == "auto" and True not in (
            config.bf16.enabled,
            config.fp16.enabled,
        ):
            rule = "only Transformers' --bf16 and --fp16 choose it, and this command has neither"
            problems.append(Problem(f"{name}.enabled", "auto", rule, "write true or false"))

    raise_problems(problems)
    assert isinstance(batch, int)
    model = model_of(config)
    assert model is not None
    sequence = config.data.sequence_length if config.data is not None else 256
    return with_settings_of(
        config, Request(model, cluster, batch, sequence, precision_of(config) or "fp32")
    )


def model_of(config: Config) -> Model | None:
    """Return the model that a configuration describes or names, or None without a model section."""
    section = config.model
    if section is None:
        return None
    written = section.model_dump(exclude_unset=True)
    if section.config is not None:
        # Without the size of a tokenizer, the default of the family, as in layout and verify.
        vocab = config.data.trained_vocabulary() if config.data is not None else None
        return Model(from_config(section.config, source="model.config", vocab=vocab), written)
    assert section.path is not None
    return Model(find_model(section.path).architecture, written)


def precision_of(config: Config) -> str | None:
    """Return "bf16", "fp16" or "fp32", or None for "auto", which the caller replaces."""
    for name in ("bf16", "fp16"):
        if getattr(config, name).enabled is True:
            return name
    if "auto" in (config.bf16.enabled, config.fp16.enabled):
        return None
    return "fp32"


def with_settings_of(config: Config, request: Request) -> Request:
    """Return the request with the settings of a configuration that are not part of the layout.

    These are compilation, the dtype of Adam's moments, and the dtype of the gradient reduction.
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
    """Return the layout fields that a file fixes. Raises ConfigError for unsupported values."""
    fixed: dict[str, int] = {}
    config = file.config
    problems = []
    for path, (name, _) in FIELDS.items():
        value = config.value(path)
        if value_at(file.tree, path) in (None, "auto") or value in (None, "auto"):
            continue
        if name == "recompute":
            if value not in RECOMPUTE_FIXED:
                remedy = f'use "auto" or {", ".join(RECOMPUTE_FIXED)}'
                if config.parallel.recompute.budget_gib is not None:
                    remedy += ", and leave parallel.recompute.budget_gib out"
                problems.append(
                    Problem(path, value, "not a mode that can be fixed for a plan", remedy)
                )
                continue
            value = RECOMPUTE_INDEX[value]
        fixed[name] = int(value)

    if (
        config.parallel.recompute.budget_gib is not None
        and config.parallel.recompute.mode != "budget"
    ):
        problems.append(
            Problem(
                "parallel.recompute.budget_gib",
                config.parallel.recompute.budget_gib,
                "the planner chooses budgets itself, but a fixed mode has none",
                "leave it out",
            )
        )

    problems += _fix_details(config, fixed)
    raise_problems(problems)
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
            problems.append(
                Problem(
                    "parallel.pipeline.schedule",
                    pipeline.schedule,
                    "not a schedule that the planner supports",
                    f"use {', '.join(SCHEDULE_INDEX)}",
                )
            )

    if pipeline.stages_per_rank is not None and several:
        fixed["vpp"] = pipeline.stages_per_rank
    if pipeline.blocks_per_stage is not None and "pp" not in fixed:
        problems.append(
            Problem(
                "parallel.pipeline.blocks_per_stage",
                None,
                "it fixes the stages, but parallel.pp leaves their number open",
                "set parallel.pp, or leave parallel.pipeline.blocks_per_stage out",
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
        fixed["offload"] = 0 if offload.device == "none" else round(100 * offload.ratio)
    return problems


def _defaults(file: File) -> dict[str, int]:
    """Return the defaults of omitted options, as layout fields.

    Omitted options that belong to an option with the value "auto" are left out, because the search
    chooses them.
    """
    defaults: dict[str, int] = {}
    for path, (name, default) in FIELDS.items():
        if value_at(file.tree, path) is None and default != "auto":
            defaults[name] = int(default)
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
        if name not in fixed and owner not in auto_paths(file.tree):
            defaults[name] = plain[name]
    if fixed.get("vpp", 1) > 1 and "schedule" not in fixed:
        defaults["schedule"] = SCHEDULES.index("interleaved")
    elif "schedule" in fixed and "vpp" not in fixed:
        # The schedule determines its number of chunks.
        defaults.pop("vpp", None)
    return defaults


def _without_unused_details(fixed: Mapping[str, int]) -> dict[str, int]:
    """Drop the fields that describe pipelines, context parallelism or recomputation if unused."""
    # `plait train` ignores them.
    unused = set()
    if fixed.get("pp") == 1:
        unused |= {"schedule", "vpp"}
    if fixed.get("cp") == 1:
        unused.add("context")
    if fixed.get("recompute") == RECOMPUTE.index("none"):
        unused.add("every")
    return {name: value for name, value in fixed.items() if name not in unused}


def _without(tree: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return a copy of a nested mapping without the entries at `paths`."""
    result = copy.deepcopy(dict(tree))
    for path in paths:
        *sections, name = path.split(".")
        parent = result
        for section in sections:
            parent = parent[section]
        del parent[name]
    return result


def layout_of(resolved: Resolved) -> dict[str, Any]:
    """Return the layout fields of a resolved configuration.

    Schedules and recomputation modes that the planner can estimate have the planner's names. All
    others have the names that the configuration uses. `vpp` is missing if the file does not set it.
    """
    layout = resolved.layout
    pipeline = resolved.pipeline
    modes = {name: planner_name for planner_name, name in RECOMPUTE_NAMES.items()}
    schedule = SCHEDULES[0]
    if layout.pp > 1:
        schedules = {name: planner_name for planner_name, name in SCHEDULE_NAMES.items()}
        schedule = schedules.get(pipeline.schedule, pipeline.schedule)
    offload = resolved.optimizer_offload
    fields = {
        "pp": layout.pp,
        "schedule": schedule,
        "tp": layout.tp,
        "sp": int(resolved.tensor_parallel.sequence_parallel),
        "cp": layout.cp,
        "context": CONTEXT.index(resolved.context_parallel.context),
        "ep": layout.ep,
        "dp_replicate": layout.dp_replicate,
        "dp_shard": layout.dp_shard,
        "stage": resolved.data_parallel.stage,
        "recompute": modes.get(resolved.recompute.mode, resolved.recompute.mode),
        "every": resolved.recompute.every,
        "loss_chunk": resolved.loss_chunk_tokens,
        "micro_batch": resolved.batch.micro_batch_size,
        "accumulation": resolved.batch.accumulation,
        "offload": offload.ratio if offload.device != "none" else 0.0,
    }
    if layout.pp > 1 and pipeline.stages_per_rank is not None:
        fields["vpp"] = pipeline.stages_per_rank
    return fields


_VALUES: dict[str, tuple[Any, ...]] = {
    "zero_optimization.offload_optimizer.device": ("cpu",),
    "parallel.recompute.mode": ("full", "selective", "none"),
    "optimizer.type": ("Adam", "AdamW"),
}
"""Modelled values besides the default, by setting."""
MODELLED = frozenset(PATHS.values()) - _VALUES.keys() | {
    "zero_optimization.offload_optimizer.ratio",
    "train_batch_size",
    "communication_data_type",
    "fp16.enabled",
    "bf16.enabled",
    "compile.enabled",
    "optimizer.states",
    "data.sequence_length",
    "data.vocab_size",
    "model.config",
    "model.path",
}
"""Settings on which the predicted times and bytes depend."""

WITHOUT_EFFECT = (
    "data_parallel_size",
    "num_layers",
    "gradient_clipping",
    "optimizer.params",
    "scheduler",
    "fp16",
    "bf16",
    "data",
    "run",
    "parallel.blocks",
    "parallel.unused_parameters",
)
"""Settings and sections whose effect is smaller than a plan's own error."""

_OWNERS = {
    "zero_optimization.offload_optimizer": "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param": "zero_optimization.offload_param.device",
    "parallel.activation_offload": "parallel.activation_offload.fraction",
    "compile": "compile.enabled",
    "parallel.recompute": "parallel.recompute.mode",
}
"""Setting that enables a section. Without it nothing in the section has an effect."""


def unmodelled(config: Config) -> tuple[str, ...]:
    """Return the settings of a configuration that the planner does not model, as `key = value`."""
    default = Config.model_validate(
        {"model": {"path": "any"}, "optimizer": {}, "data": {}, "run": {}}
    )
    settings = []
    for path in schema_fields():
        if path in MODELLED or any(
            path == name or path.startswith(f"{name}.") for name in WITHOUT_EFFECT
        ):
            continue
        value = config.value(path)
        usual = default.value(path)
        if value in (None, usual, *_VALUES.get(path, ())):
            continue
        owner = next(
            (o for section, o in _OWNERS.items() if path.startswith(f"{section}.") and path != o),
            None,
        )
        if owner is not None and config.value(owner) == default.value(owner):
            continue
        settings.append(f"{path} = {value}")

    return tuple(settings)
