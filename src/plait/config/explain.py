"""What a file means, as rows: each of its keys with its status and meaning, and each resolved value with its source. Pure data.

`plait config explain` prints them. A key that a resolved configuration does not come to read is shown as meaningless, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.config.deepspeed import Status
from plait.config.degrees import smallest_world
from plait.config.resolve import Resolved, finish, look, resolve
from plait.config.schema import Config, Row
from plait.config.source import Source
from plait.config.techniques import has_buckets
from plait.errors import ConfigError, Problem
from plait.parallel.data import DataParallel
from plait.parallel.parameter_offload import ParameterOffload
from plait.parallel.tensor import TensorParallel
from plait.units import GIB, MIB


@dataclass(frozen=True)
class Value:
    """One resolved value."""

    name: str
    """The key that sets it, or, where no single key does, the part that it belongs to."""
    value: Any
    source: str


@dataclass(frozen=True)
class Explanation:
    """All there is to say about a file."""

    name: str
    world_size: int | None
    """None where the file is too wrong to have a layout."""
    keys: tuple[Row, ...]
    """One row a key, in the order of the file."""
    values: tuple[Value, ...]
    """Empty where there are problems."""
    problems: tuple[Problem, ...]


def explain(source: Source, overrides: Sequence[str] = (), *, world_size: int | None = None) -> Explanation:
    """Read, check and resolve `source` for `world_size` processes, by default `run.processes`, or else as few as its degrees allow.

    Raises ConfigError only where there are no keys to show (no such file, no JSON).
    """
    document, found = look(source, overrides)
    rows = tuple(found.rows)
    try:
        config = finish(document, found)
        world_size = world_size or _processes(config)
        resolved = resolve(config, world_size=world_size)
    except ConfigError as error:
        return Explanation(document.name, world_size, rows, (), error.problems)
    return Explanation(document.name, world_size, tuple(_idle(row, resolved) for row in rows), values_of(resolved), ())


def _processes(config: Config) -> int:
    given = config.run.processes if config.run is not None else "auto"
    return given if isinstance(given, int) else smallest_world(config.parallel)


# ---- keys that are supported and not read in this configuration ---------------------------------------------------------------------

_BITS = {0: "none", 4: "int4", 8: "int8"}
_FP16 = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
_DYNAMIC = _FP16[1:]
_TENSOR = tuple(TensorParallel.model_fields)

_IDLE: tuple[tuple[tuple[str, ...], Callable[[Resolved], bool], str], ...] = (
    (
        ("zero_optimization.reduce_bucket_size", "parallel.bucket_mib"),
        lambda r: not has_buckets(r.data_parallel.stage, mixed=r.precision.compute is not None),
        "gradients are reduced block by block; there are buckets only at stage 0 in the model's own dtype",
    ),
    (tuple(f"fp16.{name}" for name in _FP16), lambda r: r.precision.loss_scale is None, "fp16 is off"),
    (
        tuple(f"fp16.{name}" for name in _DYNAMIC),
        lambda r: r.precision.loss_scale is not None and r.precision.loss_scale.static > 0,
        "the loss scale is constant (fp16.loss_scale)",
    ),
    (tuple(f"parallel.{name}" for name in _TENSOR), lambda r: r.layout.tp == 1, "parallel.tp is 1"),
    (
        ("parallel.recompute.every",),
        lambda r: r.recompute.mode not in ("full", "selective"),
        "it counts blocks for the modes full and selective; a budget decides for every block",
    ),
    (("parallel.recompute.keep",), lambda r: r.recompute.mode not in ("selective", "budget"), "the mode keeps no results of operators"),
    (("parallel.recompute.sequence_length",), lambda r: r.recompute.mode != "budget", "the mode is not budget"),
    (
        ("parallel.activation_offload.device", "parallel.activation_offload.path"),
        lambda r: r.activation_offload.fraction == 0,
        "parallel.activation_offload.fraction is 0",
    ),
    (("parallel.activation_offload.path",), lambda r: r.activation_offload.device != "disk", "the device is not disk"),
    (
        tuple(f"zero_optimization.offload_optimizer.{name}" for name in ("nvme_path", "buffer_count", "buffer_size")),
        lambda r: r.optimizer_offload.device != "nvme",
        "zero_optimization.offload_optimizer.device is not nvme",
    ),
    (
        ("zero_optimization.offload_optimizer.pin_memory",),
        lambda r: r.optimizer_offload.device != "cpu",
        "zero_optimization.offload_optimizer.device is not cpu",
    ),
    (
        tuple(f"zero_optimization.offload_param.{name}" for name in ("nvme_path", "buffer_count", "buffer_size")),
        lambda r: r.parameter_offload.device != "nvme" or r.parameter_offload.with_states,
        "zero_optimization.offload_param.device is not nvme",
    ),
    (
        ("zero_optimization.offload_optimizer.ratio",),
        lambda r: r.optimizer_offload.device == "none",
        "zero_optimization.offload_optimizer.device is none",
    ),
    (("activation_checkpointing.partition_activations",), lambda r: r.layout.tp == 1, "parallel.tp is 1"),
    (
        ("parallel.links", "parallel.measure_seconds"),
        lambda r: r.data_parallel.all_reduce != "by-machines" or r.data_parallel.compression.gradients,
        "all_reduce or compress_gradients says how gradients are summed",
    ),
    (
        ("parallel.all_reduce", "parallel.links", "parallel.measure_seconds"),
        lambda r: not has_buckets(r.data_parallel.stage, mixed=r.precision.compute is not None) or r.layout.dp == 1,
        "gradients are summed so only at stage 0, in the model's own dtype, over several processes",
    ),
    (("parallel.measure_seconds",), lambda r: r.data_parallel.links is not None, "parallel.links has measurements"),
    (("parallel.all_reduce",), lambda r: r.data_parallel.compression.gradients, "compressed gradients are summed in their own way"),
    (
        ("parallel.compress_gradients", "parallel.compress_weights", "parallel.second_copy"),
        lambda r: r.layout.dp == 1,
        "one data-parallel process exchanges nothing",
    ),
    (("parallel.compress_weights",), lambda r: r.data_parallel.stage == 0, "stage 0 gathers no parameters"),
    (("parallel.second_copy",), lambda r: r.data_parallel.second_copy == 0, "stages 0 to 2 and a copy over all of dp_shard gather once"),
    (
        ("parallel.error_feedback",),
        lambda r: not any(way.gradient_bits for way in (r.data_parallel.compression, *r.data_parallel.may_compress)),
        "gradients are not quantised",
    ),
    (
        ("parallel.powersgd_rank",),
        lambda r: not any(way.powersgd_rank for way in (r.data_parallel.compression, *r.data_parallel.may_compress)),
        "compress_gradients does not have powersgd",
    ),
    (
        ("parallel.transport",),
        lambda r: r.data_parallel.stage == 0 and r.data_parallel.all_reduce != "by-machines",
        "parallel.all_reduce names one of torch's collectives",
    ),
    (
        ("parallel.transport",),
        lambda r: r.data_parallel.compression.gradients and (r.data_parallel.stage == 0 or bool(r.data_parallel.compression.weight_bits)),
        "what is compressed goes through torch's collectives",
    ),
    (("parallel.transport",), lambda r: r.layout.dp == 1, "one data-parallel process exchanges nothing"),
    (
        ("parallel.transport",),
        lambda r: r.layout.dp_shard == 1 and r.precision.compute is not None,
        "replicated parameters that are cast are reduced by torch's collectives",
    ),
    (("bf16.check_grad_overflow",), lambda r: r.precision.compute != "bfloat16", "bf16 is off"),
    (("compile.backend", "compile.mode"), lambda r: not r.compile.enabled, "compile is off"),
)


def _idle(row: Row, resolved: Resolved) -> Row:
    for paths, is_idle, why in _IDLE:
        if (
            (row.path in paths or row.path.rpartition(".")[0] in paths)
            and row.status in (Status.SUPPORTED, Status.RENAMED)
            and is_idle(resolved)
        ):
            return replace(row, status=Status.MEANINGLESS, meaning=why)
    return row


# ---- resolved values ----------------------------------------------------------------------------------------------------------------


def values_of(resolved: Resolved) -> tuple[Value, ...]:
    """Every value of a Resolved with its source, under the name that sets it."""
    named = _named(resolved)
    return tuple(Value(name, value, resolved.sources[name]) for name, value in named.items())


def _said(offload: ParameterOffload) -> str:
    return f"{offload.device}, with the states" if offload.with_states else offload.device


def _compression_of(data: DataParallel) -> str:
    if data.may_compress:
        return ", ".join(way.name for way in data.may_compress) + " or none, by the first steps"
    return "powersgd" if data.compression.powersgd_rank else _BITS[data.compression.gradient_bits]


def _named(resolved: Resolved) -> dict[str, Any]:
    scale, precision, data = resolved.precision.loss_scale, resolved.precision, resolved.data_parallel
    wire = data.compression
    values: dict[str, Any] = {
        "train_batch_size": resolved.batch.train_batch_size,
        "train_micro_batch_size_per_gpu": resolved.batch.micro_batch_size,
        "gradient_accumulation_steps": resolved.batch.accumulation,
        **{f"parallel.{axis}": degree for axis, degree in resolved.layout.degrees.items()},
        **{f"parallel.{name}": getattr(resolved.tensor_parallel, name) for name in _TENSOR},
        "parallel.blocks": list(resolved.blocks) or "found in the model",
        "parallel.bucket_mib": data.bucket_bytes / MIB,
        "parallel.unused_parameters": data.unused_parameters,
        "parallel.loss_chunk_tokens": resolved.loss_chunk_tokens,
        "parallel.recompute.mode": resolved.recompute.mode,
        "parallel.recompute.every": resolved.recompute.every,
        "parallel.recompute.keep": list(resolved.recompute.keep),
        "parallel.recompute.budget_gib": resolved.recompute.budget_bytes / GIB or "none",
        "parallel.recompute.sequence_length": resolved.recompute.sequence_length or "not needed",
        "parallel.activation_offload.fraction": resolved.activation_offload.fraction,
        "parallel.activation_offload.device": resolved.activation_offload.device,
        "parallel.activation_offload.path": resolved.activation_offload.path or "none",
        "activation_checkpointing.partition_activations": resolved.recompute.partition_inputs,
        "parallel.transport": data.transport,
        "parallel.all_reduce": data.all_reduce,
        "parallel.measure_seconds": data.measure_seconds,
        "parallel.links": data.links or "not measured",
        "parallel.compress_gradients": _compression_of(data),
        "parallel.compress_weights": _BITS[wire.weight_bits],
        "parallel.error_feedback": any(way.error_feedback or way.powersgd_rank for way in (wire, *data.may_compress)),
        "parallel.powersgd_rank": max(way.powersgd_rank for way in (wire, *data.may_compress)),
        "parallel.second_copy": data.second_copy,
        "parallel.nccl_algorithm": resolved.nccl.algorithm or "NCCL decides",
        "parallel.nccl_protocol": resolved.nccl.protocol or "NCCL decides",
        "zero_optimization.stage": data.stage,
        "zero_optimization.offload_optimizer.device": resolved.optimizer_offload.device,
        "zero_optimization.offload_param.device": _said(resolved.parameter_offload),
        "zero_optimization.offload_param.nvme_path": resolved.parameter_offload.path or "none",
        "zero_optimization.offload_param.buffer_count": resolved.parameter_offload.buffer_count,
        "zero_optimization.offload_param.buffer_size": resolved.parameter_offload.buffer_bytes // 4 or "not needed",
        "zero_optimization.offload_optimizer.pin_memory": resolved.optimizer_offload.pin_memory,
        "zero_optimization.offload_optimizer.ratio": resolved.optimizer_offload.ratio,
        "zero_optimization.offload_optimizer.nvme_path": resolved.optimizer_offload.path or "none",
        "zero_optimization.offload_optimizer.buffer_count": resolved.optimizer_offload.buffer_count,
        "zero_optimization.offload_optimizer.buffer_size": resolved.optimizer_offload.buffer_bytes // 4 or "not needed",
        "precision.compute": precision.compute or "the parameters' own",
        "precision.reduce": precision.reduce or "the gradients' own",
        "precision.check_overflow": precision.check_overflow,
    }
    if scale is not None:
        numbers = (scale.static, scale.initial_scale_power, scale.window, scale.hysteresis, scale.consecutive_hysteresis, scale.minimum)
        values |= {f"fp16.{name}": number for name, number in zip(_FP16, numbers, strict=True)}
    values["gradient_clipping"] = resolved.gradient_clipping
    values |= {"optimizer.type": resolved.optimizer.type, "optimizer.states": resolved.optimizer.states}
    values |= {f"optimizer.params.{name}": value for name, value in resolved.optimizer.params.items()}
    values["scheduler.type"] = resolved.scheduler.type if resolved.scheduler else "constant"
    values |= {f"scheduler.params.{name}": value for name, value in (resolved.scheduler.params if resolved.scheduler else {}).items()}
    values |= {f"compile.{name}": getattr(resolved.compile, name) for name in ("enabled", "backend", "mode")}
    for section in ("model", "data", "run"):
        values |= _flat(getattr(resolved, section), section, resolved)
    return values


def _flat(section: Any, path: str, resolved: Resolved) -> dict[str, Any]:
    if section is None:
        return {}
    found: dict[str, Any] = {}
    for name in type(section).model_fields:
        inner, value = f"{path}.{name}", getattr(section, name)
        if inner in resolved.sources:
            found[inner] = value
        else:
            found |= _flat(value, inner, resolved)
    return found
