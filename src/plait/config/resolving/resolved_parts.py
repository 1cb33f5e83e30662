"""Resolution of layout, batch sizes, dtypes, optimizer and schedule.

Each function with a `Findings` argument resolves a part of a `Resolved`. It determines the values
that the Config omits or sets to "auto", and records the source of every value and all problems. It
raises ConfigError if its part cannot be resolved.

Processes that pp, cp and tp do not use become data-parallel. ZeRO stage 0 replicates
(`dp_replicate`), stages 1 to 3 shard (`dp_shard`); both degrees together are hybrid sharding. Any
two of the batch sizes determine the third: train_batch_size = micro-batch size x accumulation steps
x data-parallel processes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any, NoReturn, ParamSpec, TypeVar

from plait.cluster.layout import AXES, Layout
from plait.config.dialects.keys import schema_fields
from plait.config.schema import optimizers
from plait.config.schema.config import Config, Fp16Section, ParallelSection
from plait.config.schema.lr_schedules import RUN_LENGTH
from plait.config.schema.optimization import OptimizerSpec, SchedulerSpec
from plait.config.schema.sections import SECTIONS, RunSection, TrackerSpec
from plait.errors import ConfigError, Problem, raise_problems
from plait.names import number_of
from plait.parallel.techniques.compile import Compile
from plait.parallel.techniques.mixed_precision import (
    ComputeDtype,
    LossScale,
    Precision,
    ReduceDtype,
)
from plait.policy import Policy

PLANNABLE_SETTINGS = (
    "parallel.tp",
    "parallel.pp",
    "parallel.sequence_parallel",
    "parallel.recompute.mode",
    "zero_optimization.stage",
)
"""Settings that may be "auto" in a file for `plait train` and `plait plan`, which replace it with
the result of a plan.
"""

_MAX_LISTED = 12
"""Maximum number of possible degrees that a message lists completely."""

TRAIN_KEY = "train_batch_size"
MICRO_KEY = "train_micro_batch_size_per_gpu"
CALLER_SOURCE = "the caller's"
"""Source of a micro-batch size that the file does not contain."""
ACCUMULATION_KEY = "gradient_accumulation_steps"

P = ParamSpec("P")
T = TypeVar("T")

LOSS_SCALE = {
    "static": "loss_scale",
    "initial_scale_power": "initial_scale_power",
    "window": "loss_scale_window",
    "hysteresis": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
    "minimum": "min_loss_scale",
}
"""Key of the section `fp16`, by field of LossScale."""
_REDUCE: dict[str, ReduceDtype] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

ASSUMED = "auto: Transformers' default"
"""Source of a value for "auto" that Transformers' command line would set. Its default is used."""
AUTO_RATE = "auto: the optimizer's lr"
"""Source of an "auto" `warmup_max_lr`, which the caller's optimizer may change."""
ACCUMULATED = "data_types.grad_accum_dtype"
_COMMAND_LINE = "is filled from Transformers' TrainingArguments"


@dataclass
class Findings:
    """Sources and problems that are collected while a Config is resolved."""

    config: Config
    auto: Mapping[str, Any]
    """The caller's values for "auto", by path."""
    sources: dict[str, str] = field(init=False)
    """Source of each setting, by path. It starts as the origin in the file; a function that decides
    a value replaces its source.
    """
    problems: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sources = {path: self.config.origin(path) for path in schema_fields()}

    def attempt(self, resolve_part: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a function. If it raises ConfigError, record the problems and return None.

        See Note [All problems are reported] in `resolve`.
        """
        try:
            return resolve_part(*args, **kwargs)
        except ConfigError as error:
            self.problems.extend(error.problems)
            return None

    def not_used(self, paths: Iterable[str], why: str) -> None:
        """Record that settings have no effect, with the reason."""
        for path in paths:
            self.sources[path] = f"{self.sources[path]}; not used: {why}"

    def resolve_auto(self, path: str, value: Any, default: Any, rule: str) -> Any:
        """Return the value of a setting, with "auto" replaced, and record its source.

        Args:
            path: Path of the setting.
            value: Value in the file.
            default: Value that replaces "auto" if the caller gives none.
            rule: Reason for `default`, for the recorded source.
        """
        if value != "auto":
            # A parameter of an optimizer or schedule is not a field and has no source yet.
            self.sources.setdefault(path, self.config.origin(path))
            return value
        if path in self.auto:
            self.sources[path] = "auto: the caller's"
            return self.auto[path]
        self.sources[path] = f"auto: {rule}"
        return default


def layout(findings: Findings, *, world_size: int) -> Layout:
    """Return the degrees of the parallel axes and the placement of ranks."""
    parallel = findings.config.parallel
    stage = findings.config.zero_optimization.stage
    solved = solve_layout(parallel, stage=stage, world_size=world_size)
    for axis in AXES:
        # A degree that the file gives keeps its source.
        if not isinstance(getattr(parallel, axis), int):
            findings.sources[f"parallel.{axis}"] = (
                f"derived: {number_of(world_size, 'process')} / (pp {solved.pp} x cp {solved.cp} x"
                f" tp {solved.tp}), ZeRO stage {stage}"
            )
    _check_expectations(findings, solved, world_size)
    return solved


def _check_expectations(findings: Findings, solved: Layout, world_size: int) -> None:
    """Check the layout against `data_parallel_size` and `num_layers`."""
    expected = findings.config.data_parallel_size
    if expected is not None and expected != solved.dp:
        findings.problems.append(
            Problem(
                "data_parallel_size",
                expected,
                f"dp_replicate {solved.dp_replicate} x dp_shard {solved.dp_shard} = {solved.dp}"
                f" with {number_of(world_size, 'process')} ({solved})",
                f"leave it out or set it to {solved.dp}",
            )
        )

    # The number of layers is known here only if the file contains it; otherwise the pipeline is
    # checked when the model is built.
    layers = findings.config.num_layers
    model_layers = described(findings.config, "num_hidden_layers", "n_layer")
    if layers is not None and model_layers is not None and layers != model_layers:
        findings.problems.append(
            Problem(
                "num_layers",
                layers,
                f"the model section describes {model_layers} layers",
                f"leave it out or set it to {model_layers}",
            )
        )

    layers = layers or model_layers
    if layers is not None and solved.pp > layers:
        findings.problems.append(
            Problem(
                "parallel.pp",
                solved.pp,
                f"a pipeline stage has at least one layer, but the model has {layers}",
                f"use {layers} or fewer",
            )
        )


def described(config: Config, *names: str) -> int | None:
    """Return a positive integer of `model.config`, or None.

    Args:
        config: Configuration.
        names: Names of the field in different model families. The first one that exists is used.
    """
    if config.model is None or config.model.config is None:
        return None
    for name in names:
        if name in config.model.config:
            value = config.model.config[name]
            if isinstance(value, int) and value > 0:
                return value
            return None
    return None


def solve_layout(parallel: ParallelSection, *, stage: int, world_size: int) -> Layout:
    """Return the layout of `world_size` processes.

    Args:
        parallel: Degrees. Those of data parallelism may be unset.
        stage: ZeRO stage.
        world_size: Number of processes.

    Raises:
        ConfigError: The degrees do not fit the number of processes. The error names the numbers and
            possible values.
    """
    model = parallel.pp * parallel.cp * parallel.tp
    if world_size % model:
        product = f"pp {parallel.pp} x cp {parallel.cp} x tp {parallel.tp} = {model}"
        if world_size > model:
            rule = f"{product} and {world_size} % {model} = {world_size % model}"
        else:
            rule = f"{product}, more than {number_of(world_size, 'process')}"
        remedy = "change a degree"
        possible = _nearest_worlds(parallel, stage=stage, world_size=world_size)
        if possible:
            remedy = f"start {' or '.join(map(str, possible))} processes, or {remedy}"
        raise ConfigError(Problem("parallel", None, rule, remedy))

    replicate, shard = _data_degrees(
        parallel, stage=stage, dp=world_size // model, world_size=world_size
    )
    return Layout(
        pp=parallel.pp,
        dp_replicate=replicate,
        dp_shard=shard,
        cp=parallel.cp,
        tp=parallel.tp,
        ep=parallel.ep,
    )


def _nearest_worlds(parallel: ParallelSection, *, stage: int, world_size: int) -> list[int]:
    """Return the next lower and the next higher number of processes that fit all degrees.

    The error names both, because processes can be added or removed. Either may be missing.
    """
    unit = smallest_world(parallel)
    quotient = world_size // unit
    lower: list[int] = []
    higher: list[int] = []
    # With dp_replicate alone, ZeRO takes two of these units at least.
    for count in sorted({1, 2, max(quotient, 1), quotient + 1}):
        try:
            solve_layout(parallel, stage=stage, world_size=unit * count)
        except ConfigError:
            continue
        (lower if unit * count < world_size else higher).append(unit * count)
    return [*lower[-1:], *higher[:1]]


def _processes_leave(count: int, dp: int) -> str:
    verb = "leaves" if count == 1 else "leave"
    return f"{number_of(count, 'process')} {verb} {dp} for data parallelism"


def smallest_world(parallel: ParallelSection) -> int:
    """Return the smallest number of processes that satisfies all given degrees."""
    data = [
        degree for degree in (parallel.dp_replicate, parallel.dp_shard) if isinstance(degree, int)
    ]
    stage = parallel.cp * parallel.tp * prod(data)
    # Both degrees are given, so no process is left to distribute.
    if len(data) == 2:
        return parallel.pp * stage
    # The open degree has to make the processes of a pipeline stage a multiple of ep.
    return parallel.pp * stage * (parallel.ep // gcd(stage, parallel.ep))


def _data_degrees(
    parallel: ParallelSection, *, stage: int, dp: int, world_size: int
) -> tuple[int, int]:
    """Return (dp_replicate, dp_shard), whose product is `dp`."""
    replicate = parallel.dp_replicate if isinstance(parallel.dp_replicate, int) else None
    shard = parallel.dp_shard if isinstance(parallel.dp_shard, int) else None
    if stage == 0:
        if shard is not None and shard > 1:
            raise ConfigError(
                Problem(
                    "parallel.dp_shard",
                    shard,
                    "zero_optimization.stage is 0, which shards nothing",
                    "set zero_optimization.stage to 1, 2 or 3, or leave dp_shard and dp_replicate"
                    f" out (dp_replicate becomes {dp})",
                )
            )
        # All data-parallel processes replicate.
        shard = 1

    # The open degree takes all processes; if both are open, ZeRO shards over all of them.
    if shard is None:
        replicate = replicate or 1
        shard = _remaining("dp_replicate", replicate, dp, world_size)
    elif replicate is None:
        replicate = _remaining("dp_shard", shard, dp, world_size)

    if replicate * shard != dp:
        # ZeRO needs more than one process to shard over.
        left_out = []
        if dp % shard == 0 and (shard > 1 or stage == 0):
            left_out.append("dp_replicate")
        if stage and dp % replicate == 0 and replicate < dp:
            left_out.append("dp_shard")
        start = ""
        if stage == 0 or shard > 1 or replicate == 1:
            start = f"start {number_of(world_size // dp * replicate * shard, 'process')}, or "
        raise ConfigError(
            Problem(
                "parallel",
                None,
                f"dp_replicate {replicate} x dp_shard {shard} = {replicate * shard}, but"
                f" {_processes_leave(world_size, dp)}",
                f"{start}leave {' or '.join(left_out) or 'both'} out",
            )
        )
    # ZeRO would shard over one process, which is stage 0 under another name.
    if stage > 0 and shard == 1 and dp > 1:
        raise ConfigError(
            Problem(
                "parallel.dp_shard",
                1,
                f"zero_optimization.stage is {stage}, which shards over dp_shard, but"
                f" dp_replicate takes all {dp} data-parallel processes",
                f"leave dp_shard and dp_replicate out (dp_shard becomes {dp}), or set"
                " zero_optimization.stage to 0",
            )
        )
    return replicate, shard


def _remaining(name: str, degree: int, dp: int, world_size: int) -> int:
    """Return the other data-parallel degree, given that the degree `name` is `degree`."""
    if dp % degree == 0:
        return dp // degree

    # ZeRO needs more than one process to shard over, unless there is only one.
    divisors = [str(number) for number in range(1, dp + 1) if dp % number == 0]
    least_others = 1 if name == "dp_shard" else 2
    if dp > 1:
        divisors.remove("1" if name == "dp_shard" else str(dp))
    if len(divisors) > _MAX_LISTED:
        divisors = [*divisors[:6], "...", *divisors[-3:]]
    rule = f"{_processes_leave(world_size, dp)} and {dp} % {degree} = {dp % degree}"
    # The next lower number of processes that the degree divides, or the lowest of all.
    possible = world_size // dp * degree * max(least_others, dp // degree)
    raise ConfigError(
        Problem(
            f"parallel.{name}",
            degree,
            rule,
            f"use {', '.join(divisors)}, or start {possible} processes",
        )
    )


def batch(findings: Findings, *, dp: int, micro_batch_size: int | None) -> Batch:
    """Return the batch sizes.

    Args:
        findings: Sources and problems.
        dp: Number of data-parallel processes.
        micro_batch_size: Micro-batch size from the caller, for a file without batch sizes.
    """
    config = findings.config
    sizes: dict[str, int | None] = {}
    for name in (TRAIN_KEY, MICRO_KEY, ACCUMULATION_KEY):
        value = getattr(config, name)
        if value == "auto":
            value = findings.auto.get(name)
            findings.sources[name] = "auto: the caller's"
        sizes[name] = value

    # The caller's micro-batch size must not contradict a file that determines it.
    if sizes[TRAIN_KEY] is None and sizes[MICRO_KEY] is None:
        if micro_batch_size is not None:
            sizes[MICRO_KEY] = micro_batch_size
            findings.sources[MICRO_KEY] = CALLER_SOURCE
        elif "auto" in (config.train_batch_size, config.train_micro_batch_size_per_gpu):
            path = MICRO_KEY if config.train_micro_batch_size_per_gpu == "auto" else TRAIN_KEY
            raise ConfigError(
                Problem(
                    path,
                    "auto",
                    f"{_COMMAND_LINE}, but none are passed",
                    f"write the number of samples, in {MICRO_KEY} or in {TRAIN_KEY} (dp is {dp})",
                )
            )

    solved = solve_batch(sizes[TRAIN_KEY], sizes[MICRO_KEY], sizes[ACCUMULATION_KEY], dp)
    train = solved.train_batch_size
    micro = solved.micro_batch_size
    accumulation = solved.accumulation
    if sizes[TRAIN_KEY] is None:
        findings.sources[TRAIN_KEY] = (
            f"derived: micro {micro} x accumulation {accumulation} x dp {dp}"
        )
    if sizes[MICRO_KEY] is None:
        findings.sources[MICRO_KEY] = (
            f"derived: train {train} / (accumulation {accumulation} x dp {dp})"
        )
    if sizes[ACCUMULATION_KEY] is None:
        if sizes[TRAIN_KEY] is not None and sizes[MICRO_KEY] is not None:
            source = f"derived: train {train} / (micro {micro} x dp {dp})"
        elif config.gradient_accumulation_steps == "auto":
            source = "auto: 1"
        else:
            source = "default: 1"
        findings.sources[ACCUMULATION_KEY] = source
    return solved


class Batch(Policy):
    """Batch sizes of a run."""

    train_batch_size: int
    """Samples per optimizer step, over all processes."""
    micro_batch_size: int
    """Samples in one forward and backward pass of one data-parallel process."""
    accumulation: int
    """Forward and backward passes per optimizer step."""


def solve_batch(train: int | None, micro: int | None, accumulation: int | None, dp: int) -> Batch:
    """Return the batch sizes that satisfy `train` = `micro` x `accumulation` x `dp`.

    If only one of `train` and `micro` is given, `accumulation` is 1, as in DeepSpeed.

    Args:
        train: Samples per optimizer step, or None.
        micro: Samples per micro-batch, or None.
        accumulation: Micro-batches per optimizer step, or None.
        dp: Number of data-parallel processes.

    Raises:
        ConfigError: No integers satisfy the equation. DeepSpeed would round down and fail in an
            assertion; the error names the numbers and the nearest values that are possible.
    """
    if train is None:
        if micro is None:
            raise ConfigError(
                Problem(
                    MICRO_KEY,
                    None,
                    f"neither it nor {TRAIN_KEY} is given, and no batch size follows from the rest",
                    f"set one of the two (dp is {dp})",
                )
            )
        accumulation = accumulation or 1
        return Batch(
            train_batch_size=micro * accumulation * dp,
            micro_batch_size=micro,
            accumulation=accumulation,
        )

    if micro is not None and accumulation is not None:
        if train != micro * accumulation * dp:
            _raise_contradiction(train, micro, accumulation, dp)
    elif micro is not None:
        accumulation = _divide(train, micro * dp, f"micro {micro} x dp {dp}")
    else:
        accumulation = accumulation or 1
        micro = _divide(train, accumulation * dp, f"accumulation {accumulation} x dp {dp}")
    return Batch(train_batch_size=train, micro_batch_size=micro, accumulation=accumulation)


def _divide(train: int, divisor: int, product: str) -> int:
    """Return `train` / `divisor`. `product` describes the divisor in the error."""
    if train % divisor == 0:
        return train // divisor
    # DeepSpeed rounds down, and then fails in an assertion.
    rule = f"{product} = {divisor} and {train} % {divisor} = {train % divisor}"
    below = train // divisor * divisor
    possible = f"{below} or {below + divisor}" if below else f"{divisor}"
    raise ConfigError(Problem(TRAIN_KEY, train, rule, f"use {possible}, or change a factor"))


def _raise_contradiction(train: int, micro: int, accumulation: int, dp: int) -> NoReturn:
    product = micro * accumulation * dp
    # Each remedy changes one of the three values and keeps the others.
    remedies = [f"{TRAIN_KEY} {product}"]
    if train % (micro * dp) == 0:
        remedies.append(f"{ACCUMULATION_KEY} {train // (micro * dp)}")
    if train % (accumulation * dp) == 0:
        remedies.append(f"{MICRO_KEY} {train // (accumulation * dp)}")
    raise ConfigError(
        Problem(
            TRAIN_KEY,
            train,
            f"{MICRO_KEY} {micro} x {ACCUMULATION_KEY} {accumulation} x dp {dp} = {product}, not"
            f" {train}",
            f"set {', or '.join(remedies)}, or leave one of the three out",
        )
    )


def precision(findings: Findings) -> Precision:
    """Return the dtypes of computation and reduction, and the loss scale of float16."""
    config = findings.config
    fp16_enabled, bf16_enabled = _enabled_dtypes(findings)
    check_overflow = findings.resolve_auto(
        "bf16.check_grad_overflow", config.bf16.check_grad_overflow, True, "DeepSpeed's default"
    )
    if fp16_enabled and bf16_enabled:
        raise ConfigError(
            Problem(
                "fp16.enabled and bf16.enabled",
                None,
                "are both true, but a model computes in one dtype",
                "set one of them to false",
            )
        )

    compute: ComputeDtype | None = None
    loss_scale = None
    sources = findings.sources
    sources["precision.compute"] = "default: neither fp16 nor bf16 is enabled"
    sources["precision.check_overflow"] = "default: neither fp16 nor bf16 is enabled"
    if fp16_enabled:
        compute = "float16"
        sources["precision.compute"] = f"{sources['fp16.enabled']}: fp16.enabled"
        sources["precision.check_overflow"] = "derived: the loss scale of fp16 needs it"
        # Every overflow changes the scale, so the check cannot be switched off.
        check_overflow = True
    elif bf16_enabled:
        compute = "bfloat16"
        sources["precision.compute"] = f"{sources['bf16.enabled']}: bf16.enabled"
        sources["precision.check_overflow"] = (
            f"{sources['bf16.check_grad_overflow']}: bf16.check_grad_overflow"
        )
    else:
        check_overflow = False

    reduce = _reduce_dtype(findings, compute)
    if fp16_enabled:
        loss_scale = _loss_scale(findings, config.fp16)
    float32_modules: tuple[str, ...] = ()
    if config.data_types.keep_in_fp32_modules != "auto":
        float32_modules = tuple(config.data_types.keep_in_fp32_modules)
    return Precision(
        compute=compute,
        float32_modules=float32_modules,
        reduce=reduce,
        loss_scale=loss_scale,
        check_overflow=bool(check_overflow),
    )


def _enabled_dtypes(findings: Findings) -> tuple[bool, bool]:
    """Return (whether float16 is enabled, whether bfloat16 is enabled).

    The caller's value replaces "auto". Without such a value, "auto" is off if the other dtype is
    on. Otherwise "auto" is refused, because it could silently mean a run in float32, which costs
    several times as much.
    """
    values = {"fp16": findings.config.fp16.enabled, "bf16": findings.config.bf16.enabled}
    enabled = {}
    for name, value in values.items():
        enabled[name] = findings.auto.get(f"{name}.enabled") if value == "auto" else value
    enabled_name = next((name for name, value in enabled.items() if value), None)
    caller_decides = any(f"{name}.enabled" in findings.auto for name in values)

    problems = []
    for name, value in values.items():
        path = f"{name}.enabled"
        if value != "auto" or path in findings.auto:
            # Records the source.
            findings.resolve_auto(path, value, False, "")
        elif enabled_name is not None:
            findings.sources[path] = f"auto: off, because {enabled_name} is on"
        elif caller_decides:
            findings.sources[path] = "auto: off, as the caller chose neither"
        else:
            problems.append(
                Problem(
                    path,
                    "auto",
                    f"{_COMMAND_LINE} (--{name}), but none are passed",
                    "write true or false",
                )
            )
    raise_problems(problems)
    return bool(enabled["fp16"]), bool(enabled["bf16"])


def _reduce_dtype(findings: Findings, compute: ComputeDtype | None) -> ReduceDtype | None:
    """Return the dtype of the gradient reduction, or None for the dtype of the gradients."""
    config = findings.config
    reduce = config.communication_data_type
    accumulate = config.data_types.grad_accum_dtype
    if reduce is not None:
        stage = config.zero_optimization.stage
        if accumulate == "fp32" and reduce != "fp32" and compute is not None and stage < 2:
            findings.problems.append(
                Problem(
                    ACCUMULATED,
                    accumulate,
                    f"at ZeRO stage {stage} micro-batches are added up in the dtype of the"
                    f" reduction, and communication_data_type is {reduce}",
                    'set communication_data_type to "fp32", or leave this out',
                )
            )
        origin = config.origin("communication_data_type")
        findings.sources["precision.reduce"] = f"{origin}: communication_data_type"
        return _REDUCE[reduce]

    if compute is None:
        findings.sources["precision.reduce"] = "default: the gradients' own"
        return None
    if accumulate == "fp32":
        # Until the gradients are sharded, the micro-batches of a step are accumulated in the dtype
        # of the reduction.
        findings.sources["precision.reduce"] = f"{config.origin(ACCUMULATED)}: {ACCUMULATED}"
        return "float32"
    # DeepSpeed's default, whatever sections the file contains. See Note [One default per key] in
    # `config.schema.config`.
    findings.sources["precision.reduce"] = "default, DeepSpeed's: the dtype of the computation"
    return compute


def _loss_scale(findings: Findings, fp16: Fp16Section) -> LossScale:
    values = {}
    for name, key in LOSS_SCALE.items():
        values[name] = findings.resolve_auto(
            f"fp16.{key}",
            getattr(fp16, key),
            Fp16Section.model_fields[key].default,
            "DeepSpeed's default",
        )

    power = values["initial_scale_power"]
    initial = 2.0**power
    minimum = values["minimum"]
    # A constant scale never changes, so only a dynamic one has a minimum.
    if values["static"] == 0 and initial < minimum:
        raise ConfigError(
            Problem(
                "fp16.min_loss_scale",
                minimum,
                f"the first scale, 2^{power} = {initial:g}, is smaller",
                # All digits: six of them may be above the first scale.
                f"use at most {initial:.0f}, or raise fp16.initial_scale_power",
            )
        )
    return LossScale(**values)


def compiled(findings: Findings) -> Compile:
    """Return the settings of torch.compile."""
    section = findings.config.compile
    return Compile(
        enabled=findings.resolve_auto(
            "compile.enabled", section.enabled, False, "off, the default"
        ),
        backend=section.backend,
        mode=section.mode,
    )


def optimizer(findings: Findings) -> OptimizerSpec:
    """Return the optimizer, which is AdamW if the file names none."""
    spec = findings.config.optimizer
    if spec is None:
        return OptimizerSpec()
    params = _caller_values(
        findings, "optimizer.params", spec.params, ASSUMED.removeprefix("auto: ")
    )
    return OptimizerSpec(type=spec.type, states=spec.states, params=params).resolved()


def scheduler(
    findings: Findings, optimizer_spec: OptimizerSpec, *, total_steps: int | None
) -> SchedulerSpec | None:
    """Return the learning rate schedule, or None for a constant rate.

    Args:
        findings: Sources and problems.
        optimizer_spec: Resolved optimizer. An "auto" `warmup_max_lr` is its learning rate.
        total_steps: Length of the run from the caller. If None, `run.steps`.
    """
    spec = findings.config.scheduler
    if spec is None:
        return None

    steps = total_steps
    steps_source = "the caller's"
    if steps is None and findings.config.run is not None:
        steps = findings.config.run.steps
        steps_source = "run.steps"
    # Read only by an "auto" warmup_max_lr. If it is unknown, a problem is recorded below.
    rate = _learning_rate(optimizer_spec)

    params = _caller_values(findings, "scheduler.params", spec.params, "Transformers' rule")
    for name, value in params.items():
        if value != "auto":
            continue
        path = f"scheduler.params.{name}"
        if name in RUN_LENGTH:
            findings.sources[path] = f"auto: {steps_source}"
            if steps is None:
                findings.problems.append(
                    Problem(
                        path,
                        "auto",
                        "is the length of the run, which neither `run.steps` nor the caller gives",
                        "write the number of optimizer steps",
                    )
                )
        elif name == "warmup_max_lr":
            findings.sources[path] = AUTO_RATE
            if rate is None:
                findings.problems.append(
                    Problem(
                        path,
                        "auto",
                        "is the optimizer's lr, which optimizer.params does not give for"
                        f" {optimizer_spec.type}",
                        "set optimizer.params.lr",
                    )
                )

    return SchedulerSpec(type=spec.type, params=params).resolved(
        learning_rate=rate or 0.0, total_steps=steps
    )


def _caller_values(
    findings: Findings, path: str, params: Mapping[str, Any], rule: str
) -> dict[str, Any]:
    """Return parameters in which the caller's values replace "auto". Record their sources.

    "auto" stays if the caller gives no value.
    """
    return {
        name: findings.resolve_auto(f"{path}.{name}", value, "auto", rule)
        for name, value in params.items()
    }


def _learning_rate(spec: OptimizerSpec) -> float | None:
    """Return the optimizer's learning rate or its default, or None if it is unknown."""
    if "lr" in spec.params:
        return float(spec.params["lr"])
    if spec.type == "Lion":
        return float(optimizers.LION["lr"])
    # The class is imported only when the optimizer is built.
    if optimizers.is_path(spec.type):
        return None
    return float(inspect.signature(optimizers.torch_class(spec.type)).parameters["lr"].default)


def trackers(config: Config, run: RunSection) -> tuple[TrackerSpec, ...]:
    """Return the enabled trackers with all of their settings.

    The defaults are DeepSpeed's. If the file has a `run` section, the defaults of the output
    folder, the job name and the Weights & Biases project are Plait's own.
    """
    specs = []
    for name in SECTIONS:
        section = getattr(config, name)
        if not section.enabled:
            continue
        settings = section.model_dump(exclude={"enabled"})
        if config.run is not None:
            defaults = {"output_path": run.folder, "job_name": name}
            if name == "wandb":
                defaults["project"] = "plait"
            for key, value in defaults.items():
                # A value of the file takes precedence over the one that the run implies.
                if key in settings and config.origin(f"{name}.{key}") == "default":
                    settings[key] = value
        specs.append(TrackerSpec(name=name, settings=settings))
    return tuple(specs)
