"""The parts of a Resolved, one function each: what a Config leaves open is decided here, and the
source of every value is noted.

A function takes the `Findings` so far, notes sources and problems there, and raises ConfigError
where its part cannot be made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from plait.cluster.layout import AXES, Layout
from plait.config.dialects.keys import fields
from plait.config.resolving.batch import ACCUMULATION, CALLERS, MICRO, TRAIN, Batch, solve_batch
from plait.config.resolving.degrees import processes, solve_layout
from plait.config.schema import optimizers
from plait.config.schema.config import Config, Fp16Section
from plait.config.schema.lr_schedules import RUN_LENGTH
from plait.config.schema.optimization import OptimizerSpec, SchedulerSpec
from plait.config.schema.sections import RunSection
from plait.config.schema.trackers import SECTIONS, TrackerSpec
from plait.errors import ConfigError, Problem, refuse
from plait.parallel.compile import Compile
from plait.parallel.precision.loss_scale import LossScale
from plait.parallel.precision.mixed_precision import ComputeDtype, Precision, ReduceDtype

T = TypeVar("T")

LOSS_SCALE = {
    "static": "loss_scale",
    "initial_scale_power": "initial_scale_power",
    "window": "loss_scale_window",
    "hysteresis": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
    "minimum": "min_loss_scale",
}
"""Field of LossScale to key of `fp16`."""
_REDUCE: dict[str, ReduceDtype] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


ASSUMED = "auto: Transformers' default"
"""Source of a value that a command line of Transformers would give, and whose default there is
taken.
"""
ACCUMULATED = "data_types.grad_accum_dtype"
_COMMAND = "is what Transformers' TrainingArguments say"


@dataclass
class Findings:
    """What is known while a Config is resolved."""

    config: Config
    auto: Mapping[str, Any]
    """What "auto" means to the caller, by path."""
    sources: dict[str, str] = field(init=False)
    """Of every setting where the file or its default has it from, unless a function notes
    otherwise.
    """
    problems: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sources = {path: self.config.origin(path) for path in fields()}

    def attempt(self, part: Callable[[], T]) -> T | None:
        """The part, or None with its problems noted, so that the other parts can tell theirs."""
        try:
            return part()
        except ConfigError as error:
            self.problems.extend(error.problems)
            return None

    def not_used(self, paths: Iterable[str], why: str) -> None:
        """Note that settings have no effect here."""
        self.sources |= {path: f"{self.sources[path]}; not used: {why}" for path in paths}

    def value(self, path: str, value: Any, default: Any, rule: str) -> Any:
        """`value`; or, where it is "auto", the caller's, or else `default` for the reason `rule`.
        Notes the source.
        """
        if value != "auto":
            # of a parameter that no schema lists
            self.sources.setdefault(path, self.config.origin(path))
            return value
        if path in self.auto:
            self.sources[path] = "auto: the caller's"
            return self.auto[path]
        self.sources[path] = f"auto: {rule}"
        return default


def layout(found: Findings, *, world_size: int) -> Layout:
    """Degrees of the parallel axes and the placement of ranks."""
    parallel = found.config.parallel
    stage = found.config.zero_optimization.stage
    solved = solve_layout(parallel, stage=stage, world_size=world_size)
    for axis in AXES:
        if not isinstance(getattr(parallel, axis), int):
            rest = (
                f"derived: {processes(world_size)} / (pp {solved.pp} x cp {solved.cp} x tp"
                f" {solved.tp}), ZeRO stage {stage}"
            )
            found.sources[f"parallel.{axis}"] = rest
    _check_against(found, solved, world_size)
    return solved


def _check_against(found: Findings, solved: Layout, world_size: int) -> None:
    expected = found.config.data_parallel_size
    if expected is not None and expected != solved.dp:
        rule = (
            f"{processes(world_size)} ({solved}) make dp_replicate {solved.dp_replicate} x dp_shard"
            f" {solved.dp_shard} = {solved.dp}"
        )
        found.problems.append(
            Problem("data_parallel_size", expected, rule, f"leave it out or set it to {solved.dp}")
        )
    layers = found.config.num_layers
    told = described(found.config, "num_hidden_layers", "n_layer")
    if layers is not None and told is not None and layers != told:
        rule = f"the model section describes {told} layers"
        found.problems.append(
            Problem("num_layers", layers, rule, f"leave it out or set it to {told}")
        )
    layers = layers or told
    if layers is not None and solved.pp > layers:
        rule = f"a pipeline stage has at least one layer, and the model has {layers}"
        found.problems.append(Problem("parallel.pp", solved.pp, rule, f"use {layers} or fewer"))


def described(config: Config, *names: str) -> int | None:
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
        if value == "auto":
            found.sources[name] = "auto: the caller's"
    if given[TRAIN] is None and given[MICRO] is None and micro_batch_size is not None:
        given[MICRO], found.sources[MICRO] = micro_batch_size, CALLERS
    if (
        given[TRAIN] is None
        and given[MICRO] is None
        and "auto" in (found.config.train_batch_size, found.config.train_micro_batch_size_per_gpu)
    ):
        path = MICRO if found.config.train_micro_batch_size_per_gpu == "auto" else TRAIN
        rule = f"{_COMMAND}, and none are here"
        raise ConfigError(
            Problem(path, "auto", rule, f"write the samples, in {MICRO} or in {TRAIN} (dp is {dp})")
        )
    solved = solve_batch(given[TRAIN], given[MICRO], given[ACCUMULATION], dp)
    train = solved.train_batch_size
    micro = solved.micro_batch_size
    accumulation = solved.accumulation
    auto = found.config.gradient_accumulation_steps == "auto"
    both = given[TRAIN] is not None and given[MICRO] is not None
    derived = {
        TRAIN: f"derived: micro {micro} x accumulation {accumulation} x dp {dp}",
        MICRO: f"derived: train {train} / (accumulation {accumulation} x dp {dp})",
        ACCUMULATION: (
            f"derived: train {train} / (micro {micro} x dp {dp})"
            if both
            else f"{'auto' if auto else 'default'}: 1"
        ),
    }
    found.sources |= {name: text for name, text in derived.items() if given[name] is None}
    return solved


def precision(found: Findings) -> Precision:
    """Dtypes, and the loss scale of float16."""
    fp16 = found.config.fp16
    bf16 = found.config.bf16
    half, brain = _half_or_brain(found)
    check = found.value(
        "bf16.check_grad_overflow", bf16.check_grad_overflow, True, "DeepSpeed's default"
    )
    if half and brain:
        raise ConfigError(
            Problem(
                "fp16.enabled and bf16.enabled",
                None,
                "are both true, and a model computes in one dtype",
                "set one of them to false",
            )
        )
    compute: ComputeDtype | None = "float16" if half else "bfloat16" if brain else None
    neither = "default: neither fp16 nor bf16 is enabled"
    name = "fp16" if half else "bf16"
    found.sources["precision.compute"] = (
        f"{found.sources[f'{name}.enabled']}: {name}.enabled" if compute else neither
    )
    found.sources["precision.check_overflow"] = (
        "derived: the loss scale of fp16 needs it"
        if half
        else (
            f"{found.sources['bf16.check_grad_overflow']}: bf16.check_grad_overflow"
            if brain
            else neither
        )
    )
    kept = found.config.data_types.keep_in_fp32_modules
    return Precision(
        compute=compute,
        float32_modules=() if kept == "auto" else tuple(kept),
        reduce=_reduce(found, compute),
        loss_scale=_loss_scale(found, fp16) if half else None,
        check_overflow=bool(half or (brain and check)),
    )


def _half_or_brain(found: Findings) -> tuple[bool, bool]:
    """(float16, bfloat16). "auto" is the caller's choice; without one it follows only where the
    other is switched on. It is never taken for off: an unintended run in float32 costs several
    times as much, silently.
    """
    values = {"fp16": found.config.fp16.enabled, "bf16": found.config.bf16.enabled}
    whole = {
        name: found.auto.get(f"{name}.enabled") if value == "auto" else value
        for name, value in values.items()
    }
    on = next((name for name, value in whole.items() if value), None)
    told = any(f"{name}.enabled" in found.auto for name in values)
    problems = []
    for name, value in values.items():
        path = f"{name}.enabled"
        if value != "auto" or path in found.auto:
            found.value(path, value, False, "")
        elif on is not None or told:
            found.sources[path] = (
                f"auto: off, because {on} is on" if on else "auto: off, as the caller chose neither"
            )
        else:
            rule = f"{_COMMAND} (--{name}), and none are here"
            problems.append(Problem(path, "auto", rule, "write true or false"))
    refuse(problems)
    return bool(whole["fp16"]), bool(whole["bf16"])


def _reduce(found: Findings, compute: ComputeDtype | None) -> ReduceDtype | None:
    named = found.config.communication_data_type
    if named is not None:
        wanted = found.config.data_types.grad_accum_dtype
        stage = found.config.zero_optimization.stage
        if wanted == "fp32" and named != "fp32" and compute is not None and stage < 2:
            rule = (
                f"at ZeRO stage {stage} micro-batches are added up in the dtype of the reduction,"
                f" and communication_data_type is {named}"
            )
            found.problems.append(
                Problem(
                    ACCUMULATED,
                    wanted,
                    rule,
                    'set communication_data_type to "fp32", or leave this out',
                )
            )
        found.sources["precision.reduce"] = (
            f"{found.config.origin('communication_data_type')}: communication_data_type"
        )
        return _REDUCE[named]
    if compute is None:
        found.sources["precision.reduce"] = "default: the gradients' own"
        return None
    if found.config.data_types.grad_accum_dtype == "fp32":
        # Gradients of a step's micro-batches are added up in what they are reduced in, until the
        # stages shard them.
        found.sources["precision.reduce"] = f"{found.config.origin(ACCUMULATED)}: {ACCUMULATED}"
        return "float32"
    # As in DeepSpeed, whatever else the file says: a default that looked at other keys would change
    # when one is added.
    found.sources["precision.reduce"] = "default, DeepSpeed's: the dtype of the computation"
    return compute


def _loss_scale(found: Findings, fp16: Fp16Section) -> LossScale:
    defaults = Fp16Section.model_fields
    values = {
        name: found.value(
            f"fp16.{key}", getattr(fp16, key), defaults[key].default, "DeepSpeed's default"
        )
        for name, key in LOSS_SCALE.items()
    }
    power = values["initial_scale_power"]
    first = 2.0 ** values["initial_scale_power"]
    least = values["minimum"]
    if values["static"] == 0 and first < least:
        remedy = f"use at most {first:g}, or raise fp16.initial_scale_power"
        raise ConfigError(
            Problem(
                "fp16.min_loss_scale",
                least,
                f"the first scale is 2^{power} = {first:g}, below it",
                remedy,
            )
        )
    return LossScale(**values)


def compiled(found: Findings) -> Compile:
    """torch.compile."""
    section = found.config.compile
    enabled = found.value("compile.enabled", section.enabled, False, "off, the default")
    return Compile(enabled=enabled, backend=section.backend, mode=section.mode)


def optimizer(found: Findings) -> OptimizerSpec:
    """The optimizer, AdamW where the file names none."""
    spec = found.config.optimizer
    if spec is None:
        return OptimizerSpec()
    params = _callers(found, "optimizer.params", spec.params, ASSUMED.removeprefix("auto: "))
    return OptimizerSpec(type=spec.type, states=spec.states, params=params).resolved()


def scheduler(
    found: Findings, chosen: OptimizerSpec, *, total_steps: int | None
) -> SchedulerSpec | None:
    """The schedule; None is a constant learning rate. An "auto" length is `total_steps`, else
    `run.steps`.
    """
    spec = found.config.scheduler
    if spec is None:
        return None
    steps = total_steps
    whose = "the caller's"
    if steps is None and found.config.run is not None:
        steps = found.config.run.steps
        whose = "run.steps"
    rate = _learning_rate(chosen)
    params = _callers(found, "scheduler.params", spec.params, "Transformers' rule")
    for name in (name for name, value in params.items() if value == "auto"):
        path = f"scheduler.params.{name}"
        if name in RUN_LENGTH:
            found.sources[path] = f"auto: {whose}"
            if steps is None:
                rule = "is the length of the run, which neither `run.steps` nor the caller gives"
                found.problems.append(
                    Problem(path, "auto", rule, "write the number of optimizer steps")
                )
        elif name == "warmup_max_lr":
            found.sources[path] = "auto: the optimizer's lr"
            if rate is None:
                rule = (
                    f"is the optimizer's lr, which optimizer.params does not give for {chosen.type}"
                )
                found.problems.append(Problem(path, "auto", rule, "set optimizer.params.lr"))
    return SchedulerSpec(type=spec.type, params=params).resolved(
        learning_rate=rate or 0.0, total_steps=steps
    )


def _callers(found: Findings, path: str, params: Mapping[str, Any], rule: str) -> dict[str, Any]:
    """The caller's values in place of "auto", where it has some; notes the source of every
    parameter.
    """
    return {
        name: found.value(f"{path}.{name}", value, "auto", rule) for name, value in params.items()
    }


def _learning_rate(spec: OptimizerSpec) -> float | None:
    """The optimizer's lr, or what it takes by itself; None where that is not known."""
    if "lr" in spec.params:
        return float(spec.params["lr"])
    if spec.type == "Lion":
        return float(optimizers.LION["lr"])
    if optimizers.is_path(spec.type):
        return None
    return float(inspect.signature(optimizers.torch_class(spec.type)).parameters["lr"].default)


def trackers(config: Config, run: RunSection) -> tuple[TrackerSpec, ...]:
    """Return the trackers of the sections and of `run.trackers`, with all of their settings.

    Raises:
        ConfigError: A tracker is named twice.
    """
    specs = []
    for name in SECTIONS:
        section = getattr(config, name)
        if section.enabled:
            settings = section.model_dump(exclude={"enabled"})
            specs.append(TrackerSpec(name=name, settings=settings))
    for entry in run.trackers:
        if entry.name in [spec.name for spec in specs]:
            rule = "this tracker is enabled twice, and each step would be recorded twice"
            remedy = f"keep one entry of run.trackers, or the section `{entry.name}`"
            raise ConfigError(Problem("run.trackers", entry.name, rule, remedy))
        defaults = SECTIONS[entry.name]().model_dump(exclude={"enabled"})
        if "output_path" in defaults:
            defaults |= {"output_path": run.folder, "job_name": entry.name}
        if entry.name == "wandb":
            defaults["project"] = "plait"
        specs.append(TrackerSpec(name=entry.name, settings=defaults | entry.settings))
    return tuple(specs)
