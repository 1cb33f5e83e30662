"""Explanation of a configuration, which `plait config explain` prints.

Each key of the file becomes a row with its status and meaning. Each resolved value is listed with
its source. A key that has no effect on the resolved configuration is shown as ignored, with the
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.cluster.layout import Layout
from plait.config.resolving.resolve import Resolved, build_config, examine_source, outline
from plait.config.resolving.resolved_parts import LOSS_SCALE, Batch, smallest_world
from plait.config.resolving.techniques import has_buckets
from plait.config.schema.config import Config, KeyReport, Status
from plait.config.schema.optimization import OptimizerSpec, SchedulerSpec
from plait.config.schema.sections import SECTIONS
from plait.config.source import Source
from plait.config.values import MAX_PROCESSES
from plait.errors import ConfigError, Problem
from plait.parallel.accounting.compression_scheme import Scheme
from plait.parallel.techniques.compile import Compile
from plait.parallel.techniques.data_collectives import Compression
from plait.parallel.techniques.data_parallel import DataParallel
from plait.parallel.techniques.experts import Routing
from plait.parallel.techniques.mixed_precision import Precision
from plait.parallel.techniques.offload import ActivationOffload, OptimizerOffload, ParameterOffload
from plait.parallel.techniques.recompute import Recompute
from plait.parallel.techniques.tensor_parallel import TensorParallel
from plait.parallel.techniques.tiled_mlp import TiledMLP
from plait.policy import Policy
from plait.sizes import GIB, MIB


@dataclass(frozen=True)
class Value:
    """Resolved value and its source."""

    name: str
    """Key that sets the value, or the part that it belongs to if no single key sets it."""
    value: Any
    source: str


@dataclass(frozen=True)
class Explanation:
    """Keys and resolved values of a configuration, and its problems."""

    name: str
    """Path of the file, or a phrase if there is none."""
    world_size: int | None
    """Number of processes. None if problems prevent a layout."""
    keys: tuple[KeyReport, ...]
    """Rows of all keys, in the order of the file."""
    values: tuple[Value, ...]
    """Resolved values. If there are problems, those that could be resolved."""
    problems: tuple[Problem, ...]


def explain(
    source: Source | Sequence[str], overrides: Sequence[str] = (), *, world_size: int | None = None
) -> Explanation:
    """Read, check and resolve a configuration, and explain it.

    Args:
        source: See `load`.
        overrides: See `load`.
        world_size: Number of processes. If None, `run.processes`, or else the smallest number that
            satisfies the degrees.

    Raises:
        ConfigError: There are no keys to explain (no such file, invalid JSON). Other problems are
            part of the result.
    """
    document, examined = examine_source(source, overrides)
    rows = tuple(examined.rows)
    try:
        config = build_config(document, examined)
        world_size = world_size or _default_processes(config)
    except ConfigError as error:
        return Explanation(document.name, world_size, rows, (), error.problems)

    draft = outline(config, world_size=world_size)
    # Keys without effect are found in a `Resolved`, which needs all values.
    if not draft.problems:
        rows = _mark_unused(rows, Resolved(**draft.values, sources=draft.sources))
    values = values_of(draft.values, draft.sources)
    return Explanation(document.name, world_size, rows, values, draft.problems)


def _default_processes(config: Config) -> int:
    # `run.processes` may be "auto", for which a machine would have to be inspected.
    count = smallest_world(config.parallel)
    if config.run is not None and isinstance(config.run.processes, int):
        count = config.run.processes
    if count > MAX_PROCESSES:
        raise ConfigError(
            Problem(
                "parallel",
                None,
                f"its degrees require {count:,} processes, but there are at most {MAX_PROCESSES:,}",
                "lower one of them",
            )
        )
    return count


def _mark_unused(rows: Sequence[KeyReport], resolved: Resolved) -> tuple[KeyReport, ...]:
    """Mark the keys that have no effect as ignored."""
    reasons: dict[str, str] = {}
    for applies, paths, reason in _unused_rules(resolved):
        # If a setting is unused for several reasons, the first is shown.
        if applies:
            reasons = dict.fromkeys(paths, reason) | reasons

    marked = []
    for row in rows:
        # The keys of an object such as `parallel.plan` are unused with their setting.
        setting = row.path.rpartition(".")[0]
        meaning = reasons.get(row.path) or reasons.get(setting)
        if meaning is not None and row.status in (Status.SUPPORTED, Status.RENAMED):
            row = replace(row, status=Status.IGNORED, meaning=meaning)
        marked.append(row)
    return tuple(marked)


UnusedRule = tuple[bool, Sequence[str], str]
"""Rule about settings without an effect: whether it applies, their paths, and the reason."""


def _unused_rules(resolved: Resolved) -> Iterator[UnusedRule]:
    yield from _tracker_rules(resolved)
    yield from _precision_rules(resolved.precision)
    yield from _recompute_rules(resolved)
    yield from _offload_rules(resolved)
    yield from _reduction_rules(resolved)
    yield from _compression_rules(resolved)
    yield from _transport_rules(resolved)
    tensor_settings = _under("parallel", *TensorParallel.model_fields)
    yield resolved.layout.tp == 1, tensor_settings, "parallel.tp is 1"
    yield not resolved.compile.enabled, ("compile.backend", "compile.mode"), "compile is off"


def _under(section: str, *names: str) -> list[str]:
    """Return the paths of settings in a section."""
    return [f"{section}.{name}" for name in names]


def _tracker_rules(resolved: Resolved) -> Iterator[UnusedRule]:
    enabled = [spec.name for spec in resolved.trackers]
    for name, section in SECTIONS.items():
        settings = [setting for setting in section.model_fields if setting != "enabled"]
        yield name not in enabled, _under(name, *settings), f"{name}.enabled is false"


def _precision_rules(precision: Precision) -> tuple[UnusedRule, ...]:
    fp16 = _under("fp16", *LOSS_SCALE.values())
    scale = precision.loss_scale
    neither = "neither fp16 nor bf16 is on"
    return (
        (scale is None, fp16, "fp16 is off"),
        (
            scale is not None and scale.static > 0,
            [path for path in fp16 if path != "fp16.loss_scale"],
            "the loss scale is constant (fp16.loss_scale)",
        ),
        (precision.compute != "bfloat16", ["bf16.check_grad_overflow"], "bf16 is off"),
        (
            precision.compute is None,
            ["data_types.keep_in_fp32_modules"],
            f"{neither}: modules compute in the parameters' dtype",
        ),
        (
            precision.compute is None,
            ["data_types.grad_accum_dtype"],
            f"{neither}: gradients have the parameters' dtype",
        ),
    )


def _recompute_rules(resolved: Resolved) -> tuple[UnusedRule, ...]:
    mode = resolved.recompute.mode
    return (
        (
            mode not in ("full", "selective"),
            ["parallel.recompute.every"],
            "it counts blocks for the modes full and selective; a budget decides for every block",
        ),
        (
            mode not in ("selective", "budget"),
            ["parallel.recompute.keep"],
            "the mode keeps no results of operators",
        ),
        (mode != "budget", ["parallel.recompute.sequence_length"], "the mode is not budget"),
        (
            resolved.layout.tp == 1,
            ["activation_checkpointing.partition_activations"],
            "parallel.tp is 1",
        ),
        (
            mode == "none",
            _under("activation_checkpointing", "partition_activations", "cpu_checkpointing"),
            "no block is recomputed (parallel.recompute.mode is none), so there are no inputs to"
            " keep",
        ),
    )


def _offload_rules(resolved: Resolved) -> tuple[UnusedRule, ...]:
    activations = "parallel.activation_offload"
    optimizer = "zero_optimization.offload_optimizer"
    parameters = "zero_optimization.offload_param"
    files = ("nvme_path", "buffer_count", "buffer_size")
    device = resolved.optimizer_offload.device
    return (
        (
            resolved.activation_offload.fraction == 0,
            _under(activations, "device", "path"),
            f"{activations}.fraction is 0",
        ),
        (
            resolved.activation_offload.device != "disk",
            _under(activations, "path"),
            "the device is not disk",
        ),
        (device != "nvme", _under(optimizer, *files), f"{optimizer}.device is not nvme"),
        (device != "cpu", _under(optimizer, "pin_memory"), f"{optimizer}.device is not cpu"),
        (device == "none", _under(optimizer, "ratio"), f"{optimizer}.device is none"),
        (
            resolved.parameter_offload.device != "nvme" or resolved.parameter_offload.with_states,
            _under(parameters, *files),
            f"{parameters}.device is not nvme",
        ),
    )


def _reduction_rules(resolved: Resolved) -> tuple[UnusedRule, ...]:
    data = resolved.data_parallel
    buckets = has_buckets(data.stage, mixed=resolved.precision.compute is not None)
    compressed = bool(resolved.compression.scheme.gradients)
    return (
        (
            not buckets,
            ["zero_optimization.reduce_bucket_size", "parallel.bucket_mib"],
            "gradients are reduced block by block; there are buckets only at stage 0 in the"
            " model's own dtype",
        ),
        (
            data.all_reduce != "by-machines" or compressed,
            ["parallel.measure_seconds"],
            "all_reduce or compress_gradients selects how gradients are reduced",
        ),
        (
            not buckets or resolved.layout.dp == 1,
            ["parallel.all_reduce", "parallel.measure_seconds"],
            "it applies only at stage 0, in the model's own dtype, over several processes",
        ),
        (compressed, ["parallel.all_reduce"], "compressed gradients have their own all-reduce"),
    )


def _compression_rules(resolved: Resolved) -> tuple[UnusedRule, ...]:
    data = resolved.data_parallel
    schemes = resolved.compression.schemes
    return (
        (
            resolved.layout.dp == 1,
            _under("parallel", "compress_gradients", "compress_weights", "secondary_partition"),
            "one data-parallel process exchanges nothing",
        ),
        (data.stage == 0, ["parallel.compress_weights"], "stage 0 gathers no parameters"),
        (
            data.secondary_partition == 0,
            ["parallel.secondary_partition"],
            "stages 0 to 2, and a partition over all of dp_shard, gather once",
        ),
        (
            not any(scheme.gradient_bits for scheme in schemes),
            ["parallel.error_feedback"],
            "gradients are not quantised",
        ),
        (
            not any(scheme.powersgd_rank for scheme in schemes),
            ["parallel.powersgd_rank"],
            "compress_gradients does not have powersgd",
        ),
    )


def _transport_rules(resolved: Resolved) -> tuple[UnusedRule, ...]:
    data = resolved.data_parallel
    scheme = resolved.compression.scheme
    path = ["parallel.transport"]
    return (
        (
            data.stage == 0 and data.all_reduce != "by-machines",
            path,
            "parallel.all_reduce names one of torch's collectives",
        ),
        (
            bool(scheme.gradients and (data.stage == 0 or scheme.weight_bits)),
            path,
            "compressed tensors are sent by torch's collectives",
        ),
        (resolved.layout.dp == 1, path, "one data-parallel process exchanges nothing"),
        (
            resolved.layout.dp_shard == 1 and resolved.precision.compute is not None,
            path,
            "replicated parameters that are cast are reduced by torch's collectives",
        ),
    )


def values_of(parts: Mapping[str, Any], sources: Mapping[str, str]) -> tuple[Value, ...]:
    """Return the resolved values with their sources, under the keys that set them.

    Args:
        parts: Values by field of `Resolved`. Fields that could not be resolved are missing.
        sources: Source of each value, as in `Resolved`.
    """
    values: dict[str, Any] = {}
    for name, list_values in _LIST_VALUES.items():
        # A part that could not be resolved is missing.
        if name in parts:
            values |= list_values(parts[name])
    for section in ("faults", "model", "data", "run"):
        values |= _section_values(parts[section], section, sources)
    return tuple(Value(name, value, sources[name]) for name, value in values.items())


def _section_values(section: Any, path: str, sources: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a section of the schema, which may contain sections."""
    if section is None:
        return {}
    values: dict[str, Any] = {}
    for name in type(section).model_fields:
        inner = f"{path}.{name}"
        value = getattr(section, name)
        # Only settings have sources. What has none is a section.
        if inner in sources:
            values[inner] = value
        else:
            values |= _section_values(value, inner, sources)
    return values


_BITS = {0: "none", 4: "int4", 8: "int8"}
_AUTO = {"prefer-shared-memory": "auto", "by-machines": "auto"}
"""Resolved values that no file can contain, and the value that leads to them. Each process group
decides when it is created.
"""


def _batch_values(batch: Batch) -> dict[str, Any]:
    return {
        "train_batch_size": batch.train_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation,
    }


def _layout_values(layout: Layout) -> dict[str, Any]:
    return {
        f"parallel.{axis}": degree for axis, degree in {**layout.degrees, "ep": layout.ep}.items()
    }


def _of_section(section: str, policy: type[Policy]) -> Callable[[Any], dict[str, Any]]:
    """Return a function that lists the fields of an object as settings of `section`."""
    return lambda part: {f"{section}.{name}": getattr(part, name) for name in policy.model_fields}


def _single(key: str) -> Callable[[Any], dict[str, Any]]:
    """Return a function that maps a value to `{key: value}`."""
    return lambda value: {key: value}


def _block_values(blocks: Sequence[str]) -> dict[str, Any]:
    return {"parallel.blocks": list(blocks) or "found in the model"}


def _data_values(data: DataParallel) -> dict[str, Any]:
    return {
        "parallel.bucket_mib": data.bucket_bytes / MIB,
        "parallel.unused_parameters": data.unused_parameters,
        "parallel.transport": _AUTO.get(data.transport, data.transport),
        "parallel.all_reduce": _AUTO.get(data.all_reduce, data.all_reduce),
        "parallel.measure_seconds": data.measure_seconds,
        "parallel.secondary_partition": data.secondary_partition,
        "zero_optimization.stage": data.stage,
    }


def _compression_values(compression: Compression) -> dict[str, Any]:
    schemes = compression.schemes
    return {
        "parallel.compress_gradients": _compress_gradients(compression),
        "parallel.compress_weights": _BITS[compression.scheme.weight_bits],
        "parallel.error_feedback": any(
            scheme.error_feedback or scheme.powersgd_rank for scheme in schemes
        ),
        "parallel.powersgd_rank": max(scheme.powersgd_rank for scheme in schemes),
    }


def _compress_gradients(compression: Compression) -> str | list[str]:
    """Return the scheme, or the candidates from which the first steps select."""
    if compression.candidates:
        return [_scheme_name(scheme) for scheme in compression.candidates]
    return _scheme_name(compression.scheme)


def _scheme_name(scheme: Scheme) -> str:
    return "powersgd" if scheme.powersgd_rank else _BITS[scheme.gradient_bits]


def _tiled_mlp_values(tiled: TiledMLP) -> dict[str, Any]:
    return {"parallel.mlp_tile_tokens": tiled.tokens}


def _recompute_values(recompute: Recompute) -> dict[str, Any]:
    return {
        "parallel.recompute.mode": recompute.mode,
        "parallel.recompute.every": recompute.every,
        "parallel.recompute.keep": list(recompute.keep),
        "parallel.recompute.budget_gib": recompute.budget_bytes / GIB or "none",
        "parallel.recompute.sequence_length": recompute.sequence_length or "not needed",
        "activation_checkpointing.partition_activations": recompute.partition_inputs,
    }


def _activation_offload_values(offload: ActivationOffload) -> dict[str, Any]:
    return {
        "parallel.activation_offload.fraction": offload.fraction,
        "parallel.activation_offload.device": offload.device,
        "parallel.activation_offload.path": offload.path or "none",
    }


def _parameter_offload_values(offload: ParameterOffload) -> dict[str, Any]:
    section = "zero_optimization.offload_param"
    device: str = offload.device
    if offload.with_states:
        device = f"{device}, with the states"
    return {
        f"{section}.device": device,
        f"{section}.nvme_path": offload.path or "none",
        f"{section}.buffer_count": offload.buffer_count,
        # The key counts float32 elements.
        f"{section}.buffer_size": offload.buffer_bytes // 4 or "not needed",
    }


def _optimizer_offload_values(offload: OptimizerOffload) -> dict[str, Any]:
    section = "zero_optimization.offload_optimizer"
    return {
        f"{section}.device": offload.device,
        f"{section}.pin_memory": offload.pin_memory,
        f"{section}.ratio": offload.ratio,
        f"{section}.nvme_path": offload.path or "none",
        f"{section}.buffer_count": offload.buffer_count,
        # The key counts float32 elements.
        f"{section}.buffer_size": offload.buffer_bytes // 4 or "not needed",
    }


def _precision_values(precision: Precision) -> dict[str, Any]:
    values: dict[str, Any] = {
        "precision.compute": precision.compute or "the parameters' own",
        "precision.reduce": precision.reduce or "the gradients' own",
        "precision.check_overflow": precision.check_overflow,
    }
    scale = precision.loss_scale
    if scale is not None:
        values |= {f"fp16.{key}": getattr(scale, name) for name, key in LOSS_SCALE.items()}
    return values


def _optimizer_values(spec: OptimizerSpec) -> dict[str, Any]:
    params = {f"optimizer.params.{name}": value for name, value in spec.params.items()}
    return {"optimizer.type": spec.type, "optimizer.states": spec.states, **params}


def _scheduler_values(spec: SchedulerSpec | None) -> dict[str, Any]:
    if spec is None:
        return {"scheduler.type": "constant"}
    params = {f"scheduler.params.{name}": value for name, value in spec.params.items()}
    return {"scheduler.type": spec.type, **params}


_LIST_VALUES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "batch": _batch_values,
    "layout": _layout_values,
    "tensor_parallel": _of_section("parallel", TensorParallel),
    "routing": _of_section("experts", Routing),
    "blocks": _block_values,
    "data_parallel": _data_values,
    "compression": _compression_values,
    "loss_chunk_tokens": _single("parallel.loss_chunk_tokens"),
    "tiled_mlp": _tiled_mlp_values,
    "recompute": _recompute_values,
    "activation_offload": _activation_offload_values,
    "parameter_offload": _parameter_offload_values,
    "optimizer_offload": _optimizer_offload_values,
    "precision": _precision_values,
    "gradient_clipping": _single("gradient_clipping"),
    "optimizer": _optimizer_values,
    "scheduler": _scheduler_values,
    "compile": _of_section("compile", Compile),
}
"""Functions that return the values of a part of Resolved by key, in the order of the output."""
