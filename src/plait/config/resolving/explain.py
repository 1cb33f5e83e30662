"""What a file means, as rows: each of its keys with its status and meaning, and each resolved value
with its source. Pure data.

`plait config explain` prints them. A key that has no effect on the resolved configuration is shown
as ignored, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.config.reading.source import Source
from plait.config.resolving.degrees import smallest_world
from plait.config.resolving.resolve import Outline, Resolved, finish, look, outline
from plait.config.resolving.resolved_parts import LOSS_SCALE
from plait.config.resolving.techniques import has_buckets
from plait.config.schema.config import Config
from plait.config.schema.provenance import Row, Status
from plait.config.schema.trackers import SECTIONS
from plait.config.values.numbers import MAX_PROCESSES
from plait.errors import ConfigError, Problem
from plait.parallel.data.compression import Compression
from plait.parallel.data.data_parallel import DataParallel
from plait.parallel.offload.parameter_offload import ParameterOffload
from plait.parallel.precision.mixed_precision import Precision
from plait.parallel.tensor.tensor_parallel import TensorParallel
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
    """The explanation of a file."""

    name: str
    world_size: int | None
    """None where the file is too wrong to have a layout."""
    keys: tuple[Row, ...]
    """One row a key, in the order of the file."""
    values: tuple[Value, ...]
    """Those that can be had; where there are problems, not all."""
    problems: tuple[Problem, ...]


def explain(
    source: Source | Sequence[str], overrides: Sequence[str] = (), *, world_size: int | None = None
) -> Explanation:
    """Read, check and resolve `source` for `world_size` processes, by default `run.processes`, or
    else as few as its degrees allow.

    Raises ConfigError only where there are no keys to show (no such file, no JSON).
    """
    document, found = look(source, overrides)
    rows = tuple(found.rows)
    try:
        config = finish(document, found)
        world_size = world_size or _processes(config)
    except ConfigError as error:
        return Explanation(document.name, world_size, rows, (), error.problems)
    draft = outline(config, world_size=world_size)
    if draft.problems:
        return Explanation(document.name, world_size, rows, values_of(draft), draft.problems)
    resolved = Resolved(**draft.values, sources=draft.sources)
    return Explanation(
        document.name, world_size, tuple(_idle(row, resolved) for row in rows), values_of(draft), ()
    )


def _processes(config: Config) -> int:
    given = config.run.processes if config.run is not None else "auto"
    count = given if isinstance(given, int) else smallest_world(config.parallel)
    if count > MAX_PROCESSES:
        raise ConfigError(
            Problem(
                "parallel",
                None,
                f"its degrees take {count:,} processes, and there are at most {MAX_PROCESSES:,}",
                "lower one",
            )
        )
    return count


_BITS = {0: "none", 4: "int4", 8: "int8"}
_FP16 = tuple(f"fp16.{key}" for key in LOSS_SCALE.values())
_TENSOR = tuple(TensorParallel.model_fields)


def _is_off(tracker: str) -> Callable[[Resolved], bool]:
    return lambda resolved: tracker not in [spec.name for spec in resolved.trackers]


_IDLE: tuple[tuple[tuple[str, ...], Callable[[Resolved], bool], str], ...] = (
    *(
        (
            tuple(f"{name}.{setting}" for setting in section.model_fields if setting != "enabled"),
            _is_off(name),
            f"{name}.enabled is false",
        )
        for name, section in SECTIONS.items()
    ),
    (
        ("zero_optimization.reduce_bucket_size", "parallel.bucket_mib"),
        lambda r: not has_buckets(r.data_parallel.stage, mixed=r.precision.compute is not None),
        (
            "gradients are reduced block by block; there are buckets only at stage 0 in the model's"
            " own dtype"
        ),
    ),
    (_FP16, lambda r: r.precision.loss_scale is None, "fp16 is off"),
    (
        _FP16[1:],
        lambda r: r.precision.loss_scale is not None and r.precision.loss_scale.static > 0,
        "the loss scale is constant (fp16.loss_scale)",
    ),
    (tuple(f"parallel.{name}" for name in _TENSOR), lambda r: r.layout.tp == 1, "parallel.tp is 1"),
    (
        ("parallel.recompute.every",),
        lambda r: r.recompute.mode not in ("full", "selective"),
        "it counts blocks for the modes full and selective; a budget decides for every block",
    ),
    (
        ("parallel.recompute.keep",),
        lambda r: r.recompute.mode not in ("selective", "budget"),
        "the mode keeps no results of operators",
    ),
    (
        ("parallel.recompute.sequence_length",),
        lambda r: r.recompute.mode != "budget",
        "the mode is not budget",
    ),
    (
        ("parallel.activation_offload.device", "parallel.activation_offload.path"),
        lambda r: r.activation_offload.fraction == 0,
        "parallel.activation_offload.fraction is 0",
    ),
    (
        ("parallel.activation_offload.path",),
        lambda r: r.activation_offload.device != "disk",
        "the device is not disk",
    ),
    (
        tuple(
            f"zero_optimization.offload_optimizer.{name}"
            for name in ("nvme_path", "buffer_count", "buffer_size")
        ),
        lambda r: r.optimizer_offload.device != "nvme",
        "zero_optimization.offload_optimizer.device is not nvme",
    ),
    (
        ("zero_optimization.offload_optimizer.pin_memory",),
        lambda r: r.optimizer_offload.device != "cpu",
        "zero_optimization.offload_optimizer.device is not cpu",
    ),
    (
        tuple(
            f"zero_optimization.offload_param.{name}"
            for name in ("nvme_path", "buffer_count", "buffer_size")
        ),
        lambda r: r.parameter_offload.device != "nvme" or r.parameter_offload.with_states,
        "zero_optimization.offload_param.device is not nvme",
    ),
    (
        ("zero_optimization.offload_optimizer.ratio",),
        lambda r: r.optimizer_offload.device == "none",
        "zero_optimization.offload_optimizer.device is none",
    ),
    (
        ("activation_checkpointing.partition_activations",),
        lambda r: r.layout.tp == 1,
        "parallel.tp is 1",
    ),
    (
        (
            "activation_checkpointing.partition_activations",
            "activation_checkpointing.cpu_checkpointing",
        ),
        lambda r: r.recompute.mode == "none",
        (
            "no block is recomputed (parallel.recompute.mode is none), so no input of one is kept"
            " anywhere"
        ),
    ),
    (
        ("data_types.keep_in_fp32_modules",),
        lambda r: r.precision.compute is None,
        "neither fp16 nor bf16 is on: modules compute in the parameters' dtype",
    ),
    (
        ("data_types.grad_accum_dtype",),
        lambda r: r.precision.compute is None,
        "neither fp16 nor bf16 is on: gradients have the parameters' dtype",
    ),
    (
        ("parallel.measure_seconds",),
        lambda r: r.data_parallel.all_reduce != "by-machines" or r.compression.scheme.gradients,
        "all_reduce or compress_gradients selects how gradients are reduced",
    ),
    (
        ("parallel.all_reduce", "parallel.measure_seconds"),
        lambda r: (
            not has_buckets(r.data_parallel.stage, mixed=r.precision.compute is not None)
            or r.layout.dp == 1
        ),
        "it applies only at stage 0, in the model's own dtype, over several processes",
    ),
    (
        ("parallel.all_reduce",),
        lambda r: r.compression.scheme.gradients,
        "compressed gradients have their own all-reduce",
    ),
    (
        (
            "parallel.compress_gradients",
            "parallel.compress_weights",
            "parallel.secondary_partition",
        ),
        lambda r: r.layout.dp == 1,
        "one data-parallel process exchanges nothing",
    ),
    (
        ("parallel.compress_weights",),
        lambda r: r.data_parallel.stage == 0,
        "stage 0 gathers no parameters",
    ),
    (
        ("parallel.secondary_partition",),
        lambda r: r.data_parallel.secondary_partition == 0,
        "stages 0 to 2, and a partition over all of dp_shard, gather once",
    ),
    (
        ("parallel.error_feedback",),
        lambda r: not any(way.gradient_bits for way in r.compression.schemes),
        "gradients are not quantised",
    ),
    (
        ("parallel.powersgd_rank",),
        lambda r: not any(way.powersgd_rank for way in r.compression.schemes),
        "compress_gradients does not have powersgd",
    ),
    (
        ("parallel.transport",),
        lambda r: r.data_parallel.stage == 0 and r.data_parallel.all_reduce != "by-machines",
        "parallel.all_reduce names one of torch's collectives",
    ),
    (
        ("parallel.transport",),
        lambda r: (
            r.compression.scheme.gradients
            and (r.data_parallel.stage == 0 or bool(r.compression.scheme.weight_bits))
        ),
        "what is compressed goes through torch's collectives",
    ),
    (
        ("parallel.transport",),
        lambda r: r.layout.dp == 1,
        "one data-parallel process exchanges nothing",
    ),
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
            return replace(row, status=Status.IGNORED, meaning=why)
    return row


def values_of(resolved: Resolved | Outline) -> tuple[Value, ...]:
    """Every value of a Resolved, or of what could be had of one, with its source, under the name
    that sets it.
    """
    values = (
        resolved.values
        if isinstance(resolved, Outline)
        else {name: getattr(resolved, name) for name in Resolved.model_fields}
    )
    named = _named(values, resolved.sources)
    return tuple(Value(name, value, resolved.sources[name]) for name, value in named.items())


def _said(offload: ParameterOffload) -> str:
    return f"{offload.device}, with the states" if offload.with_states else offload.device


def _scheme_of(compression: Compression) -> str | list[str]:
    names = [
        "powersgd" if one.powersgd_rank else _BITS[one.gradient_bits]
        for one in compression.candidates or [compression.scheme]
    ]
    # the first steps decide among several, or for none
    return names if compression.candidates else names[0]


def _named(values: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """A part of a configuration that could not be resolved is left out."""
    found: dict[str, Any] = {}
    for part, tell in _TELL.items():
        if part in values:
            found |= tell(values[part])
    for section in ("faults", "model", "data", "run"):
        found |= _flat(values[section], section, sources)
    return found


_AUTO = {"prefer-shared-memory": "auto", "by-machines": "auto"}
"""Resolved values that no file can contain, and the "auto" that leads to them. Each process group
decides when it is made."""


def _of_data(data: DataParallel) -> dict[str, Any]:
    return {
        "parallel.bucket_mib": data.bucket_bytes / MIB,
        "parallel.unused_parameters": data.unused_parameters,
        "parallel.transport": _AUTO.get(data.transport, data.transport),
        "parallel.all_reduce": _AUTO.get(data.all_reduce, data.all_reduce),
        "parallel.measure_seconds": data.measure_seconds,
        "parallel.secondary_partition": data.secondary_partition,
        "zero_optimization.stage": data.stage,
    }


def _of_compression(compression: Compression) -> dict[str, Any]:
    return {
        "parallel.compress_gradients": _scheme_of(compression),
        "parallel.compress_weights": _BITS[compression.scheme.weight_bits],
        "parallel.error_feedback": any(
            scheme.error_feedback or scheme.powersgd_rank for scheme in compression.schemes
        ),
        "parallel.powersgd_rank": max(scheme.powersgd_rank for scheme in compression.schemes),
    }


def _of_precision(precision: Precision) -> dict[str, Any]:
    found: dict[str, Any] = {
        "precision.compute": precision.compute or "the parameters' own",
        "precision.reduce": precision.reduce or "the gradients' own",
        "precision.check_overflow": precision.check_overflow,
    }
    scale = precision.loss_scale
    if scale is not None:
        found |= {f"fp16.{key}": getattr(scale, name) for name, key in LOSS_SCALE.items()}
    return found


_TELL: dict[str, Callable[[Any], dict[str, Any]]] = {
    "batch": lambda batch: {
        "train_batch_size": batch.train_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation,
    },
    "layout": lambda layout: {
        f"parallel.{axis}": degree for axis, degree in {**layout.degrees, "ep": layout.ep}.items()
    },
    "tensor_parallel": lambda tensor: {
        f"parallel.{name}": getattr(tensor, name) for name in _TENSOR
    },
    "routing": lambda routing: {
        f"experts.{name}": getattr(routing, name)
        for name in ("bias_update_rate", "balance", "z_loss")
    },
    "blocks": lambda blocks: {"parallel.blocks": list(blocks) or "found in the model"},
    "data_parallel": _of_data,
    "compression": _of_compression,
    "loss_chunk_tokens": lambda tokens: {"parallel.loss_chunk_tokens": tokens},
    "tiled_mlp": lambda tiled: {"parallel.mlp_tile_tokens": tiled.tokens},
    "recompute": lambda recompute: {
        "parallel.recompute.mode": recompute.mode,
        "parallel.recompute.every": recompute.every,
        "parallel.recompute.keep": list(recompute.keep),
        "parallel.recompute.budget_gib": recompute.budget_bytes / GIB or "none",
        "parallel.recompute.sequence_length": recompute.sequence_length or "not needed",
        "activation_checkpointing.partition_activations": recompute.partition_inputs,
    },
    "activation_offload": lambda offload: {
        "parallel.activation_offload.fraction": offload.fraction,
        "parallel.activation_offload.device": offload.device,
        "parallel.activation_offload.path": offload.path or "none",
    },
    "library": lambda library: library.explained(),
    "parameter_offload": lambda offload: {
        "zero_optimization.offload_param.device": _said(offload),
        "zero_optimization.offload_param.nvme_path": offload.path or "none",
        "zero_optimization.offload_param.buffer_count": offload.buffer_count,
        "zero_optimization.offload_param.buffer_size": offload.buffer_bytes // 4 or "not needed",
    },
    "optimizer_offload": lambda offload: {
        "zero_optimization.offload_optimizer.device": offload.device,
        "zero_optimization.offload_optimizer.pin_memory": offload.pin_memory,
        "zero_optimization.offload_optimizer.ratio": offload.ratio,
        "zero_optimization.offload_optimizer.nvme_path": offload.path or "none",
        "zero_optimization.offload_optimizer.buffer_count": offload.buffer_count,
        "zero_optimization.offload_optimizer.buffer_size": (
            offload.buffer_bytes // 4 or "not needed"
        ),
    },
    "precision": _of_precision,
    "gradient_clipping": lambda norm: {"gradient_clipping": norm},
    "optimizer": lambda spec: {
        "optimizer.type": spec.type,
        "optimizer.states": spec.states,
        **{f"optimizer.params.{name}": value for name, value in spec.params.items()},
    },
    "scheduler": lambda spec: {
        "scheduler.type": spec.type if spec else "constant",
        **{
            f"scheduler.params.{name}": value
            for name, value in (spec.params if spec else {}).items()
        },
    },
    "compile": lambda compiled: {
        f"compile.{name}": getattr(compiled, name) for name in ("enabled", "backend", "mode")
    },
}
"""Part of a configuration to its values, under the names that set them."""


def _flat(section: Any, path: str, sources: Mapping[str, str]) -> dict[str, Any]:
    if section is None:
        return {}
    found: dict[str, Any] = {}
    for name in type(section).model_fields:
        inner = f"{path}.{name}"
        value = getattr(section, name)
        if inner in sources:
            found[inner] = value
        else:
            found |= _flat(value, inner, sources)
    return found
