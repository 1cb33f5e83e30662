"""The parts of a Resolved, one function each: what a Config leaves open is decided here, and the source of every value is noted.

A function takes the `Findings` so far, notes sources and problems there, and raises ConfigError where its part cannot be made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from plait.cluster.layout import AXES, Layout
from plait.config import optimizers
from plait.config.batch import ACCUMULATION, CALLERS, MICRO, TRAIN, Batch, solve_batch
from plait.config.degrees import processes, solve_layout
from plait.config.optimization import OptimizerSpec, SchedulerSpec
from plait.config.schedules import RUN_LENGTH
from plait.config.schema import Config, Fp16Section
from plait.errors import ConfigError, Problem
from plait.parallel.activation_offload import ActivationOffload
from plait.parallel.compile import Compile
from plait.parallel.data import DataParallel
from plait.parallel.loss_scale import LossScale
from plait.parallel.optimizer_offload import OptimizerOffload
from plait.parallel.precision import ComputeDtype, Precision, ReduceDtype
from plait.parallel.recompute import Recompute
from plait.parallel.tensor import TensorParallel
from plait.units import GIB, MIB, dtype_of

T = TypeVar("T")

_LOSS_SCALE = {
    "static": "loss_scale",
    "initial_scale_power": "initial_scale_power",
    "window": "loss_scale_window",
    "hysteresis": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
    "minimum": "min_loss_scale",
}
"""Field of LossScale to key of `fp16`."""
_REDUCE: dict[str, ReduceDtype] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass
class Findings:
    """What is known while a Config is resolved."""

    config: Config
    auto: Mapping[str, Any]
    """What "auto" means to the caller, by path."""
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def attempt(self, part: Callable[[], T]) -> T | None:
        """The part, or None with its problems noted, so that the other parts can tell theirs."""
        try:
            return part()
        except ConfigError as error:
            self.problems.extend(error.problems)
            return None

    def value(self, path: str, value: Any, default: Any, rule: str) -> Any:
        """`value`; or, where it is "auto", the caller's, or else `default` for the reason `rule`. Notes the source."""
        if value != "auto":
            self.sources[path] = self.config.origin(path)
            return value
        if path in self.auto:
            self.sources[path] = "auto: the caller's"
            return self.auto[path]
        self.sources[path] = f"auto: {rule}"
        return default


def layout(found: Findings, *, world_size: int) -> Layout:
    """Who does what."""
    parallel, stage = found.config.parallel, found.config.zero_optimization.stage
    solved = solve_layout(parallel, stage=stage, world_size=world_size)
    for axis in AXES:
        given = isinstance(getattr(parallel, axis), int)
        rest = f"derived: {processes(world_size)} / (pp {solved.pp} x cp {solved.cp} x tp {solved.tp}), ZeRO stage {stage}"
        found.sources[f"parallel.{axis}"] = found.config.origin(f"parallel.{axis}") if given else rest
    found.sources["zero_optimization.stage"] = found.config.origin("zero_optimization.stage")
    _check_against(found, solved, world_size)
    return solved


def _check_against(found: Findings, solved: Layout, world_size: int) -> None:
    expected = found.config.data_parallel_size
    if expected is not None and expected != solved.dp:
        rule = f"{processes(world_size)} ({solved}) make dp_replicate {solved.dp_replicate} x dp_shard {solved.dp_shard} = {solved.dp}"
        found.problems.append(Problem("data_parallel_size", expected, rule, f"leave it out or set it to {solved.dp}"))
    layers = found.config.num_layers
    described = _described(found.config, "num_hidden_layers", "n_layer")
    if layers is not None and described is not None and layers != described:
        rule = f"the model section describes {described} layers"
        found.problems.append(Problem("num_layers", layers, rule, f"leave it out or set it to {described}"))
    layers = layers or described
    if layers is not None and solved.pp > layers:
        rule = f"a pipeline stage has at least one layer, and the model has {layers}"
        found.problems.append(Problem("parallel.pp", solved.pp, rule, f"use {layers} or fewer"))


def _described(config: Config, *names: str) -> int | None:
    """A whole number in `model.config` under one of several names."""
    if config.model is None or config.model.config is None:
        return None
    values = [config.model.config[name] for name in names if name in config.model.config]
    return values[0] if values and isinstance(values[0], int) and values[0] > 0 else None


def batch(found: Findings, *, dp: int, micro_batch_size: int | None) -> Batch:
    """The three batch sizes. `micro_batch_size` is the caller's, for a file that gives none."""
    given: dict[str, int | None] = {}
    for name in (TRAIN, MICRO, ACCUMULATION):
        value = getattr(found.config, name)
        given[name] = found.auto.get(name) if value == "auto" else value
        found.sources[name] = "auto: the caller's" if value == "auto" else found.config.origin(name)
    if given[TRAIN] is None and given[MICRO] is None and micro_batch_size is not None:
        given[MICRO], found.sources[MICRO] = micro_batch_size, CALLERS
    solved = solve_batch(given[TRAIN], given[MICRO], given[ACCUMULATION], dp)
    train, micro, accumulation = solved.train_batch_size, solved.micro_batch_size, solved.accumulation
    auto = found.config.gradient_accumulation_steps == "auto"
    both = given[TRAIN] is not None and given[MICRO] is not None
    derived = {
        TRAIN: f"derived: micro {micro} x accumulation {accumulation} x dp {dp}",
        MICRO: f"derived: train {train} / (accumulation {accumulation} x dp {dp})",
        ACCUMULATION: f"derived: train {train} / (micro {micro} x dp {dp})" if both else f"{'auto' if auto else 'default'}: 1",
    }
    found.sources |= {name: text for name, text in derived.items() if given[name] is None}
    return solved


def precision(found: Findings) -> Precision:
    """Dtypes, and the loss scale of float16."""
    fp16, bf16 = found.config.fp16, found.config.bf16
    half = found.value("fp16.enabled", fp16.enabled, False, "off, the default")
    brain = found.value("bf16.enabled", bf16.enabled, False, "off, the default")
    check = found.value("bf16.check_grad_overflow", bf16.check_grad_overflow, True, "DeepSpeed's default")
    if half and brain:
        raise ConfigError(
            Problem("fp16.enabled and bf16.enabled", None, "are both true, and a model computes in one dtype", "set one of them to false")
        )
    compute: ComputeDtype | None = "float16" if half else "bfloat16" if brain else None
    neither = "default: neither fp16 nor bf16 is enabled"
    name = "fp16" if half else "bf16"
    found.sources["precision.compute"] = f"{found.sources[f'{name}.enabled']}: {name}.enabled" if compute else neither
    found.sources["precision.check_overflow"] = (
        "derived: the loss scale of fp16 needs it"
        if half
        else f"{found.sources['bf16.check_grad_overflow']}: bf16.check_grad_overflow"
        if brain
        else neither
    )
    return Precision(
        compute=compute,
        reduce=_reduce(found, compute),
        loss_scale=_loss_scale(found, fp16) if half else None,
        check_overflow=bool(half or (brain and check)),
    )


def _reduce(found: Findings, compute: ComputeDtype | None) -> ReduceDtype | None:
    named = found.config.communication_data_type
    if named is not None:
        found.sources["precision.reduce"] = f"{found.config.origin('communication_data_type')}: communication_data_type"
        return _REDUCE[named]
    if compute is None:
        found.sources["precision.reduce"] = "default: the gradients' own"
        return None
    found.sources["precision.reduce"] = "default of DeepSpeed: the dtype of the computation" if found.config.is_deepspeed else "default"
    return compute if found.config.is_deepspeed else "float32"


def _loss_scale(found: Findings, fp16: Fp16Section) -> LossScale:
    defaults = Fp16Section.model_fields
    values = {
        name: found.value(f"fp16.{key}", getattr(fp16, key), defaults[key].default, "DeepSpeed's default")
        for name, key in _LOSS_SCALE.items()
    }
    power, first, least = values["initial_scale_power"], 2.0 ** values["initial_scale_power"], values["minimum"]
    if values["static"] == 0 and first < least:
        remedy = f"use at most {first:g}, or raise fp16.initial_scale_power"
        raise ConfigError(Problem("fp16.min_loss_scale", least, f"the first scale is 2^{power} = {first:g}, below it", remedy))
    return LossScale(**values)


def tensor_parallel(found: Findings) -> TensorParallel:
    """How layers are split over the tp axis."""
    section = found.config.parallel
    for name in ("sequence_parallel", "loss_parallel", "plan"):
        origin = found.config.origin(f"parallel.{name}")
        found.sources[f"parallel.{name}"] = origin if section.tp > 1 else f"{origin}; not used: tp is 1"
    return TensorParallel(sequence_parallel=section.sequence_parallel, loss_parallel=section.loss_parallel, plan=section.plan)


def data_parallel(found: Findings, dtypes: Precision, *, hidden_size: int | None) -> DataParallel:
    """ZeRO stage, and how gradients are reduced."""
    unused = found.value("parallel.unused_parameters", found.config.parallel.unused_parameters, True, "DeepSpeed's default")
    bucket_bytes = _bucket_bytes(found, dtypes, hidden_size or _described(found.config, "hidden_size", "n_embd"))
    return DataParallel(stage=found.config.zero_optimization.stage, bucket_bytes=bucket_bytes, unused_parameters=unused)


def _bucket_bytes(found: Findings, dtypes: Precision, hidden_size: int | None) -> int:
    mib, path = found.config.parallel.bucket_mib, "zero_optimization.reduce_bucket_size"
    from_mib = round(mib * MIB)
    mib_source = found.config.origin("parallel.bucket_mib")
    elements, source = found.config.zero_optimization.reduce_bucket_size, found.config.origin(path)
    if elements == "auto":
        by_rule = hidden_size**2 if hidden_size is not None else None
        elements = found.auto.get(path, by_rule)
        source = "auto: the caller's" if path in found.auto else f"auto: hidden size {hidden_size} squared"
    buckets = has_buckets(found.config.zero_optimization.stage, mixed=dtypes.compute is not None)
    if elements is None or not buckets:
        found.sources["parallel.bucket_mib"] = mib_source if buckets else "not used: gradients are reduced block by block"
        return from_mib
    itemsize = dtype_of(dtypes.reduce or "float32").itemsize
    if mib_source != "default" and elements * itemsize != from_mib:
        rule = f"both set the bucket and disagree: {elements} x {itemsize} bytes = {elements * itemsize / MIB:g} MiB"
        raise ConfigError(Problem(f"{path} = {elements} and parallel.bucket_mib = {mib:g}", None, rule, "keep one of them"))
    found.sources["parallel.bucket_mib"] = f"{source}: {path}, {elements} x {itemsize} bytes"
    return int(elements) * itemsize


def has_buckets(stage: int, *, mixed: bool) -> bool:
    """Whether gradients are reduced in buckets: replicated parameters in their own dtype. All else is reduced block by block."""
    return stage == 0 and not mixed


def recompute(found: Findings) -> Recompute:
    """Which blocks recompute what."""
    section, path = found.config.parallel.recompute, "parallel.recompute"
    mode = section.mode or ("budget" if section.budget_gib is not None else "none")
    found.sources |= {f"{path}.{name}": found.config.origin(f"{path}.{name}") for name in type(section).model_fields}
    if section.mode is None and section.budget_gib is not None:
        found.sources[f"{path}.mode"] = f"derived: {path}.budget_gib is given"
    length = section.sequence_length
    if length is None and mode == "budget" and found.config.data is not None:
        length, found.sources[f"{path}.sequence_length"] = found.config.data.sequence_length, "derived: data.sequence_length"
    partition, name = found.config.activation_checkpointing.partition_activations, "activation_checkpointing.partition_activations"
    found.sources[name] = found.config.origin(name)
    problems = []
    if mode == "budget" and section.budget_gib is None:
        problems.append(Problem(f"{path}.mode", "budget", "no budget is given", f"set {path}.budget_gib"))
    if mode != "budget" and section.budget_gib is not None:
        rule = f"the mode is {mode}, which keeps what it keeps, whatever the budget"
        problems.append(Problem(f"{path}.budget_gib", section.budget_gib, rule, f'leave it out, or set {path}.mode = "budget"'))
    if mode == "budget" and length is None:
        rule = "activations grow with it, and neither it nor data.sequence_length is given"
        problems.append(Problem(f"{path}.sequence_length", None, rule, "write the longest sequence's tokens"))
    if mode == "budget" and found.sources.get(MICRO) == CALLERS:
        rule = "activations grow with the micro-batch, and the file gives no batch size"
        problems.append(Problem(f"{path}.mode", "budget", rule, "set train_micro_batch_size_per_gpu"))
    if partition and mode == "none":
        rule = f"no block is recomputed ({path}.mode is none), so there is no checkpointed input to shard"
        problems.append(Problem(name, "true", rule, f'set {path}.mode = "full", or false'))
    if problems:
        raise ConfigError(*problems)
    return Recompute(
        mode=mode,
        every=section.every,
        keep=section.keep,
        budget_bytes=round((section.budget_gib or 0) * GIB),
        sequence_length=length or 0,
        partition_inputs=partition,
    )


def activation_offload(found: Findings) -> ActivationOffload:
    """Where blocks put what they save for backward."""
    section, path = found.config.parallel.activation_offload, "parallel.activation_offload"
    found.sources |= {f"{path}.{name}": found.config.origin(f"{path}.{name}") for name in type(section).model_fields}
    to_host, name = found.config.activation_checkpointing.cpu_checkpointing, "activation_checkpointing.cpu_checkpointing"
    fraction, given = section.fraction, found.config.origin(f"{path}.fraction") != "default"
    problems = []
    if to_host:
        recompute = found.config.parallel.recompute
        if recompute.mode in (None, "none") and recompute.budget_gib is None:
            rule = "no block is recomputed (parallel.recompute.mode is none), so there is no checkpointed input to move"
            problems.append(Problem(name, "true", rule, 'set parallel.recompute.mode = "full", or false'))
        if (given and fraction != 1) or section.device != "cpu":
            rule = f"it means {path}.fraction = 1 on cpu, and the file says {fraction:g} on {section.device}"
            problems.append(Problem(name, "true", rule, "keep one of them"))
        fraction, found.sources[f"{path}.fraction"] = 1.0, f"{found.config.origin(name)}: {name}"
    if fraction and section.device == "disk" and section.path is None:
        problems.append(Problem(f"{path}.device", "disk", "no folder is given", f"set {path}.path"))
    if problems:
        raise ConfigError(*problems)
    return ActivationOffload(fraction=fraction, device=section.device, path=section.path if section.device == "disk" else None)


def optimizer_offload(found: Findings) -> OptimizerOffload:
    """The tier of optimizer states, gradients and masters."""
    section, path = found.config.zero_optimization.offload_optimizer, "zero_optimization.offload_optimizer"
    found.sources |= {f"{path}.{name}": found.config.origin(f"{path}.{name}") for name in type(section).model_fields}
    parameters, name = found.config.zero_optimization.offload_param.device, "zero_optimization.offload_param.device"
    found.sources[name] = found.config.origin(name)
    problems = []
    if parameters == "cpu" and (section.device != "cpu" or found.config.zero_optimization.stage != 3):
        rule = f"shards are the master parameters, and {path}.device is {section.device} at stage {found.config.zero_optimization.stage}"
        problems.append(Problem(name, parameters, rule, f'set {path}.device = "cpu" and stage 3, or "none"'))
    if section.device == "none" and not problems:
        return OptimizerOffload()
    if section.device == "nvme" and section.nvme_path is None:
        problems.append(Problem(f"{path}.device", "nvme", "no folder is given", f"set {path}.nvme_path"))
    if section.device != "none" and found.config.zero_optimization.stage == 0:
        rule = "ZeRO stage 0 keeps whole optimizer states on every process"
        problems.append(Problem(f"{path}.device", section.device, rule, "set zero_optimization.stage to 1, 2 or 3"))
    if problems:
        raise ConfigError(*problems)
    if section.device == "cpu":
        return OptimizerOffload(device="cpu", pin_memory=section.pin_memory)
    return OptimizerOffload(device="nvme", path=section.nvme_path, buffer_bytes=4 * section.buffer_size, buffer_count=section.buffer_count)


def compiled(found: Findings) -> Compile:
    """torch.compile."""
    section = found.config.compile
    enabled = found.value("compile.enabled", section.enabled, False, "off, the default")
    found.sources |= {f"compile.{name}": found.config.origin(f"compile.{name}") for name in ("backend", "mode")}
    return Compile(enabled=enabled, backend=section.backend, mode=section.mode)


def optimizer(found: Findings) -> OptimizerSpec:
    """The optimizer, AdamW where the file names none."""
    spec = found.config.optimizer
    found.sources["optimizer.type"] = found.config.origin("optimizer.type")
    if spec is None:
        return OptimizerSpec()
    params = _callers(found, "optimizer.params", spec.params, "Transformers' default")
    return OptimizerSpec(type=spec.type, params=params).resolved()


def scheduler(found: Findings, chosen: OptimizerSpec, *, total_steps: int | None) -> SchedulerSpec | None:
    """The schedule; None is a constant learning rate. An "auto" length is `total_steps`, else `run.steps`."""
    spec = found.config.scheduler
    found.sources["scheduler.type"] = found.config.origin("scheduler.type")
    if spec is None:
        return None
    steps, whose = total_steps, "the caller's"
    if steps is None and found.config.run is not None:
        steps, whose = found.config.run.steps, "run.steps"
    rate = _learning_rate(chosen)
    params = _callers(found, "scheduler.params", spec.params, "Transformers' rule")
    for name in (name for name, value in params.items() if value == "auto"):
        path = f"scheduler.params.{name}"
        if name in RUN_LENGTH:
            found.sources[path] = f"auto: {whose}"
            if steps is None:
                rule = "is the length of the run, which neither `run.steps` nor the caller gives"
                found.problems.append(Problem(path, "auto", rule, "write the number of optimizer steps"))
        elif name == "warmup_max_lr":
            found.sources[path] = "auto: the optimizer's lr"
            if rate is None:
                rule = f"is the optimizer's lr, which optimizer.params does not give for {chosen.type}"
                found.problems.append(Problem(path, "auto", rule, "set optimizer.params.lr"))
    return SchedulerSpec(type=spec.type, params=params).resolved(learning_rate=rate or 0.0, total_steps=steps)


def _callers(found: Findings, path: str, params: Mapping[str, Any], rule: str) -> dict[str, Any]:
    """The caller's values in place of "auto", where it has some; notes the source of every parameter."""
    return {name: found.value(f"{path}.{name}", value, "auto", rule) for name, value in params.items()}


def _learning_rate(spec: OptimizerSpec) -> float | None:
    """The optimizer's lr, or what it takes by itself; None where that is not known."""
    if "lr" in spec.params:
        return float(spec.params["lr"])
    if spec.type == "Lion":
        return 1e-4
    if optimizers.is_path(spec.type):
        return None
    return float(inspect.signature(optimizers.torch_class(spec.type)).parameters["lr"].default)
