"""The techniques that a file configures, with the source of every value.

Pure, like `parts`, which does the rest of a configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from plait.cluster.layout import Layout
from plait.comm.algorithms import Name
from plait.config.resolving.batch import CALLERS, MICRO, Batch
from plait.config.resolving.resolved_parts import Findings, described
from plait.config.schema import optimizers
from plait.config.schema.config import Config
from plait.config.schema.optimization import OptimizerSpec
from plait.config.values.names import instead
from plait.errors import ConfigError, Problem, refuse
from plait.parallel.accounting.compression_scheme import Scheme
from plait.parallel.activations import selective
from plait.parallel.activations.activation_offload import ActivationOffload
from plait.parallel.activations.recompute import Recompute
from plait.parallel.context.context_parallel import ContextParallel
from plait.parallel.data.compression import Compression
from plait.parallel.data.data_parallel import DataParallel
from plait.parallel.offload.optimizer_offload import OptimizerOffload
from plait.parallel.offload.parameter_offload import ParameterOffload
from plait.parallel.pipeline.pipeline_parallel import Pipeline
from plait.parallel.precision.mixed_precision import Precision
from plait.parallel.schedules.schedule import SCHEDULES
from plait.parallel.tensor.tensor_parallel import TensorParallel
from plait.units import GIB, MIB, dtype_of

_TIERS = {"none": "the device", "cpu": "the host", "nvme": "disk"}

DEFAULT_BUCKET_BYTES = 25 * MIB
"""That of DistributedDataParallel."""
_SCHEMES = ("int8", "int4", "powersgd")
"""The least lossy first."""
_BY_GROUP = ": auto, decided by each group when it is made"
_BITS: Mapping[str, Literal[4, 8]] = {"int8": 8, "int4": 4}


def tensor_parallel(found: Findings) -> TensorParallel:
    """How layers are split over the tp axis."""
    section = found.config.parallel
    names = tuple(TensorParallel.model_fields)
    if section.tp == 1:
        found.not_used((f"parallel.{name}" for name in names), "tp is 1")
    return TensorParallel(**{name: getattr(section, name) for name in names})


def context_parallel(found: Findings) -> ContextParallel:
    """How sequences are cut over the cp axis."""
    section = found.config.parallel
    if section.cp == 1:
        found.not_used(("parallel.context",), "cp is 1")
    return ContextParallel(context=section.context)


def _refuse(
    path: str, value: object, rules: Iterable[tuple[bool, str, str]], *, otherwise: str
) -> None:
    """Raise ConfigError with every (applies, rule, remedy) that applies; `otherwise` is a value of
    the setting that is always possible.
    """
    problems = [
        Problem(path, value, rule, f"{remedy}, or {otherwise}")
        for applies, rule, remedy in rules
        if applies
    ]
    refuse(problems)


def refuse_overlap(tensor: TensorParallel, pipeline: Pipeline, at: Layout) -> None:
    """The settings that overlapped all-reduces cannot be combined with. Raises ConfigError with all
    of them.
    """
    if at.tp == 1 or not tensor.tensor_overlap:
        return
    schedule = SCHEDULES.get(pipeline.schedule)
    splits = at.pp > 1 and schedule is not None and schedule.splits_backward
    rules = (
        (
            tensor.sequence_parallel,
            (
                "parallel.sequence_parallel is true, whose all-gathers and reduce-scatters are not"
                " cut into chunks"
            ),
            "set that to false",
        ),
        (
            splits,
            f"{pipeline.schedule} defers the gradients of weights itself",
            "use the schedule 1f1b or interleaved-1f1b",
        ),
    )
    _refuse("parallel.tensor_overlap", tensor.tensor_overlap, rules, otherwise="0")


def pipeline(found: Findings, solved: Layout) -> Pipeline:
    """How the pp axis is used. Whether the schedule exists for the numbers is asked when the model
    is there (`Pipeline.check`).
    """
    section = found.config.parallel.pipeline
    if solved.pp == 1:
        found.not_used(
            (f"parallel.pipeline.{name}" for name in type(section).model_fields), "pp is 1"
        )
    schedule = section.schedule
    if schedule is None:
        several = (section.stages_per_rank or 1) > 1
        schedule = "interleaved-1f1b" if several else "1f1b"
        if several:
            found.sources["parallel.pipeline.schedule"] = (
                f"derived: {section.stages_per_rank} stages a rank"
            )
    if schedule not in SCHEDULES:
        rule = "is not a pipeline schedule that Plait runs"
        found.problems.append(
            Problem("parallel.pipeline.schedule", schedule, rule, instead(schedule, SCHEDULES))
        )
    return Pipeline(
        schedule=schedule,
        stages_per_rank=section.stages_per_rank,
        blocks_per_stage=section.blocks_per_stage,
    )


def data_parallel(
    found: Findings, dtypes: Precision, scheme: Scheme, *, shard: int, hidden_size: int | None
) -> DataParallel:
    """ZeRO stage, and how gradients are reduced over `shard` processes that share the parameters
    out.
    """
    unused = found.value(
        "parallel.unused_parameters",
        found.config.parallel.unused_parameters,
        True,
        "DeepSpeed's default",
    )
    bucket_bytes = _bucket_bytes(
        found, dtypes, hidden_size or described(found.config, "hidden_size", "n_embd")
    )
    transport = found.config.parallel.transport
    checked = found.config.faults.check_collectives
    if checked and transport == "shared-memory":
        rule = "parallel.transport is shared-memory, whose exchanges torch does not see"
        raise ConfigError(
            Problem(
                "faults.check_collectives", True, rule, 'set parallel.transport = "torch", or false'
            )
        )
    if transport == "auto":
        found.sources["parallel.transport"] += _BY_GROUP
    return DataParallel(
        stage=found.config.zero_optimization.stage,
        bucket_bytes=bucket_bytes or scheme.bucket_bytes(DEFAULT_BUCKET_BYTES),
        bucket_by_links=bucket_bytes is None,
        unused_parameters=unused,
        transport=(
            "torch" if checked else "prefer-shared-memory" if transport == "auto" else transport
        ),
        all_reduce=_all_reduce(found),
        measure_seconds=found.config.parallel.measure_seconds,
        secondary_partition=_secondary_partition(found, shard),
        update_in_backward=found.config.parallel.optimizer_in_backward,
    )


def _all_reduce(found: Findings) -> Name | Literal["by-machines"]:
    wanted = found.config.parallel.all_reduce
    path = "parallel.all_reduce"
    if wanted == "auto":
        found.sources[path] += _BY_GROUP
        return "by-machines"
    if (
        found.config.parallel.transport == "shared-memory"
        and found.config.zero_optimization.stage == 0
    ):
        rule = "parallel.transport is shared-memory, which has its own all-reduce"
        raise ConfigError(Problem(path, wanted, rule, 'use "auto" for one of them'))
    return wanted


def compression(found: Findings, dtypes: Precision) -> Compression:
    """The compression from the first step on, and the candidates from which the first steps may
    select one.
    """
    parallel = found.config.parallel
    stage = found.config.zero_optimization.stage
    buckets = has_buckets(stage, mixed=dtypes.compute is not None)
    gradients = parallel.compress_gradients
    path = "parallel.compress_gradients"
    if stage and "powersgd" in (gradients if isinstance(gradients, list) else [gradients]):
        rule = f"factors a matrix's full gradient, and ZeRO stage {stage} reduces it in shards"
        raise ConfigError(
            Problem(path, gradients, rule, 'use "int8", or zero_optimization.stage 0')
        )
    decided = gradients == "auto" or isinstance(gradients, list)
    if decided and not stage and parallel.all_reduce != "auto":
        rule = f"parallel.all_reduce is {parallel.all_reduce}, which leaves nothing to decide"
        raise ConfigError(
            Problem(
                path,
                gradients,
                rule,
                'set parallel.all_reduce = "auto", or this to "int8" or "none"',
            )
        )
    if gradients != "none" and stage == 0 and not buckets:
        rule = (
            "at ZeRO stage 0 with bf16 or fp16, torch reduces gradients block by block and cannot"
            " be given another collective"
        )
        raise ConfigError(
            Problem(
                path,
                gradients,
                rule,
                "use zero_optimization.stage 1, or compute in the model's own dtype",
            )
        )
    default, rule = (
        (True, "stage 0")
        if stage == 0
        else (False, f"stage {stage}, where it would hold full gradients")
    )
    feedback = found.value("parallel.error_feedback", parallel.error_feedback, default, rule)

    def of(scheme: str, weights: str = "none") -> Scheme:
        bits = _BITS.get(scheme, 0)
        rank = parallel.powersgd_rank if scheme == "powersgd" else 0
        return Scheme(
            gradient_bits=bits,
            weight_bits=_BITS.get(weights, 0),
            powersgd_rank=rank,
            error_feedback=bool(feedback) and bits > 0,
            revocable=dtypes.check_overflow
            or dtypes.loss_scale is not None
            or found.config.faults.non_finite == "skip",
        )

    allowed = gradients if isinstance(gradients, list) else ["int8", "int4"] if decided else []
    now = "none" if isinstance(gradients, list) else gradients
    first = of(now, parallel.compress_weights if stage else "none")
    return Compression(
        scheme=first, candidates=tuple(of(scheme) for scheme in _SCHEMES if scheme in allowed)
    )


def refuse_in_backward(
    data: DataParallel,
    compressed: Compression,
    at: Layout,
    batch: Batch,
    precision: Precision,
    states: OptimizerOffload,
    *,
    clipping: float,
    non_finite: str,
) -> None:
    """What an update in the backward does not go with: what needs all gradients first, and what is
    not proven. Raises ConfigError with all of it.
    """
    if not data.update_in_backward:
        return
    replicated = data.stage == 0 and at.dp > 1
    rules = (
        (
            batch.accumulation > 1,
            (
                f"gradient_accumulation_steps is {batch.accumulation}: a gradient is complete after"
                " the last"
            ),
            "use 1",
        ),
        (
            clipping > 0,
            f"gradient_clipping is {clipping:g}, which needs the norm of all gradients",
            "set gradient_clipping = 0",
        ),
        (
            precision.loss_scale is not None,
            "float16 needs to know of an overflow before the first update",
            "use bf16",
        ),
        (
            precision.check_overflow and precision.loss_scale is None,
            (
                "bf16.check_grad_overflow asks whether all gradients are finite before the first"
                " update"
            ),
            "set bf16.check_grad_overflow = false",
        ),
        (
            non_finite != "auto",
            (
                f"faults.non_finite is {non_finite!r}, which asks whether all gradients are finite"
                " before the first update"
            ),
            'set faults.non_finite = "auto"',
        ),
        (
            replicated,
            (
                f"{at.dp} processes at ZeRO stage 0 reduce gradients in buckets, which stay:"
                " nothing would be freed"
            ),
            "use zero_optimization.stage 1 to 3",
        ),
        (
            data.unused_parameters and at.dp > 1 and not replicated,
            (
                "parallel.unused_parameters looks at the end of the backward which gradients"
                " nobody has"
            ),
            "set parallel.unused_parameters = false, if every step uses every parameter",
        ),
        (
            at.pp > 1,
            (
                f"parallel.pp is {at.pp}: a stage adds up the gradients of all micro-batches of a"
                " step, and those of tied parameters are summed over their stages at its end"
            ),
            "use parallel.pp = 1",
        ),
        (
            states.device != "none",
            f"offload_optimizer.device is {states.device}, whose step reads all parameters",
            'use "none"',
        ),
        (
            compressed.gradients,
            "it is not proven with compressed gradients",
            'set parallel.compress_gradients = "none"',
        ),
    )
    _refuse("parallel.optimizer_in_backward", "true", rules, otherwise="false")


def refuse_unsharded_optimizer(
    spec: OptimizerSpec, data: DataParallel, dtypes: Precision, layout: Layout
) -> None:
    """Raise ConfigError for an optimizer of torch that fails at its first step on the shards of
    this layout.
    """
    why = optimizers.NOT_SHARDED.get(spec.type)
    shards = {
        "zero_optimization.stage": data.stage,
        "parallel.tp": layout.tp if layout.tp > 1 else 0,
        "precision.compute": dtypes.compute,
    }
    name, value = next(((name, value) for name, value in shards.items() if value), ("", None))
    if why is None or not name:
        return
    rule = f"{why}, and torch cannot do that on sharded parameters, which {name} = {value} makes"
    remedy = "use AdamW, or zero_optimization.stage 0 without tensor parallelism, bf16 and fp16"
    raise ConfigError(Problem("optimizer.type", spec.type, rule, remedy))


def refuse_small_states(spec: OptimizerSpec, data: DataParallel, offload: OptimizerOffload) -> None:
    """What optimizer states of fewer bytes are not proven with. Raises ConfigError with all of
    it.
    """
    if spec.states is None:
        return
    rules = (
        (
            offload.device != "none",
            f"offload_optimizer.device is {offload.device}, with which it is not proven",
            'use device "none"',
        ),
        (
            data.update_in_backward,
            "parallel.optimizer_in_backward is true, with which it is not proven",
            "set that to false",
        ),
    )
    _refuse("optimizer.states", spec.states, rules, otherwise="leave it out")


def _secondary_partition(found: Findings, shard: int) -> int:
    wanted = found.config.parallel.secondary_partition
    path = "parallel.secondary_partition"
    if wanted in (0, 1) or found.config.zero_optimization.stage < 3 or wanted == shard:
        return 0
    if wanted > shard or shard % wanted:
        fitting = (
            ", ".join(str(degree) for degree in range(2, shard + 1) if shard % degree == 0) or "0"
        )
        raise ConfigError(
            Problem(
                path,
                wanted,
                f"parallel.dp_shard is {shard}, which it must divide",
                f"use {fitting}",
            )
        )
    return wanted


def _bucket_bytes(found: Findings, dtypes: Precision, hidden_size: int | None) -> int | None:
    """None: the links decide."""
    mib = found.config.parallel.bucket_mib
    path = "zero_optimization.reduce_bucket_size"
    from_mib = round(mib * MIB) if mib != "auto" else None
    mib_source = found.sources["parallel.bucket_mib"]
    elements = found.config.zero_optimization.reduce_bucket_size
    source = found.sources[path]
    if elements == "auto":
        by_rule = hidden_size**2 if hidden_size is not None else None
        elements = found.auto.get(path, by_rule)
        source = (
            "auto: the caller's"
            if path in found.auto
            else f"auto: hidden size {hidden_size} squared"
        )
    buckets = has_buckets(found.config.zero_optimization.stage, mixed=dtypes.compute is not None)
    if elements is None or not buckets:
        by_links = (
            f"{mib_source}: auto, {DEFAULT_BUCKET_BYTES // MIB} unless the links are known"
            if from_mib is None
            else mib_source
        )
        found.sources["parallel.bucket_mib"] = (
            by_links if buckets else "not used: gradients are reduced block by block"
        )
        return from_mib
    itemsize = dtype_of(dtypes.reduce or "float32").itemsize
    if from_mib is not None and elements * itemsize != from_mib:
        rule = (
            f"both set the bucket and disagree: {elements} x {itemsize} bytes ="
            f" {elements * itemsize / MIB:g} MiB"
        )
        raise ConfigError(
            Problem(
                f"{path} = {elements} and parallel.bucket_mib = {mib:g}",
                None,
                rule,
                "keep one of them",
            )
        )
    found.sources["parallel.bucket_mib"] = f"{source}: {path}, {elements} x {itemsize} bytes"
    return int(elements) * itemsize


def has_buckets(stage: int, *, mixed: bool) -> bool:
    """Whether gradients are reduced in buckets: replicated parameters in their own dtype. All else
    is reduced block by block.
    """
    return stage == 0 and not mixed


def recompute(found: Findings) -> Recompute:
    """Which blocks recompute what."""
    section = found.config.parallel.recompute
    path = "parallel.recompute"
    mode = section.mode or ("budget" if section.budget_gib is not None else "none")
    if section.mode is None and section.budget_gib is not None:
        found.sources[f"{path}.mode"] = f"derived: {path}.budget_gib is given"
    length = section.sequence_length
    if length is None and mode == "budget" and found.config.data is not None:
        length, found.sources[f"{path}.sequence_length"] = (
            found.config.data.sequence_length,
            "derived: data.sequence_length",
        )
    partition = found.config.activation_checkpointing.partition_activations
    problems = []
    selective.kept(section.keep)
    if mode == "budget" and section.budget_gib is None:
        problems.append(
            Problem(f"{path}.mode", "budget", "no budget is given", f"set {path}.budget_gib")
        )
    if mode != "budget" and section.budget_gib is not None:
        rule = f"the mode is {mode}, which keeps what it keeps, whatever the budget"
        problems.append(
            Problem(
                f"{path}.budget_gib",
                section.budget_gib,
                rule,
                f'leave it out, or set {path}.mode = "budget"',
            )
        )
    if mode == "budget" and length is None:
        rule = "activations grow with it, and neither it nor data.sequence_length is given"
        problems.append(
            Problem(f"{path}.sequence_length", None, rule, "write the longest sequence's tokens")
        )
    if mode == "budget" and found.sources.get(MICRO) == CALLERS:
        rule = "activations grow with the micro-batch, and the file gives no batch size"
        problems.append(
            Problem(f"{path}.mode", "budget", rule, "set train_micro_batch_size_per_gpu")
        )
    refuse(problems)
    return Recompute(
        mode=mode,
        every=section.every,
        keep=section.keep,
        budget_bytes=round((section.budget_gib or 0) * GIB),
        sequence_length=length or 0,
        partition_inputs=partition
        and mode
        != "none",  # without recomputation there is no checkpointed input, in DeepSpeed as here
    )


def recomputes(config: Config) -> bool:
    """Whether any block is recomputed: without, `activation_checkpointing` has no input of a block
    to keep anywhere, in DeepSpeed as here.
    """
    section = config.parallel.recompute
    return section.mode not in (None, "none") or section.budget_gib is not None


def activation_offload(found: Findings) -> ActivationOffload:
    """Where blocks put what they save for backward."""
    section = found.config.parallel.activation_offload
    path = "parallel.activation_offload"
    to_host = found.config.activation_checkpointing.cpu_checkpointing
    name = "activation_checkpointing.cpu_checkpointing"
    fraction = section.fraction
    given = found.config.origin(f"{path}.fraction") != "default"
    problems = []
    if to_host and recomputes(found.config):
        if (given and fraction != 1) or section.device != "cpu":
            rule = (
                f"it means {path}.fraction = 1 on cpu, and the file sets {fraction:g} on"
                f" {section.device}"
            )
            problems.append(Problem(name, "true", rule, "keep one of them"))
        fraction, found.sources[f"{path}.fraction"] = 1.0, f"{found.config.origin(name)}: {name}"
    if fraction and section.device == "disk" and section.path is None:
        problems.append(Problem(f"{path}.device", "disk", "no folder is given", f"set {path}.path"))
    refuse(problems)
    return ActivationOffload(
        fraction=fraction,
        device=section.device,
        path=section.path if section.device == "disk" else None,
    )


def optimizer_offload(found: Findings) -> OptimizerOffload:
    """The tier of optimizer states and gradients."""
    section = found.config.zero_optimization.offload_optimizer
    path = "zero_optimization.offload_optimizer"
    problems = []
    if section.device == "none":
        return OptimizerOffload()
    if section.device == "nvme" and section.nvme_path is None:
        problems.append(
            Problem(f"{path}.device", "nvme", "no folder is given", f"set {path}.nvme_path")
        )
    if found.config.zero_optimization.stage == 0:
        rule = "ZeRO stage 0 keeps full optimizer states on every process"
        problems.append(
            Problem(
                f"{path}.device", section.device, rule, "set zero_optimization.stage to 1, 2 or 3"
            )
        )
    refuse(problems)
    if section.device == "cpu":
        return OptimizerOffload(device="cpu", pin_memory=section.pin_memory, ratio=section.ratio)
    return OptimizerOffload(
        device="nvme",
        path=section.nvme_path,
        buffer_bytes=4 * section.buffer_size,
        buffer_count=section.buffer_count,
        ratio=section.ratio,
    )


def parameter_offload(found: Findings) -> ParameterOffload:
    """The tier of the shards that parameters are gathered from, which are the master weights."""
    zero = found.config.zero_optimization
    path = "zero_optimization.offload_param"
    section = zero.offload_param
    states = zero.offload_optimizer
    stage = zero.stage
    problems = []
    if section.device != "none" and stage != 3:
        rule = f"stage {stage} keeps parameters unsharded during a step"
        problems.append(
            Problem(
                f"{path}.device",
                section.device,
                rule,
                'set zero_optimization.stage to 3, or "none"',
            )
        )
    if section.device == "cpu" and states.device != "cpu":
        rule = (
            "shards are the master weights, which the optimizer updates where its states are, and"
            f" those are on {_TIERS[states.device]}"
        )
        problems.append(
            Problem(
                f"{path}.device",
                "cpu",
                rule,
                'set zero_optimization.offload_optimizer.device = "cpu", or "none"',
            )
        )
    if section.device == "cpu" and states.ratio < 1:
        rule = (
            "parameters are the master weights, and offload_optimizer.ratio leaves part of them on"
            " the device"
        )
        problems.append(
            Problem(f"{path}.device", "cpu", rule, 'use "none", or offload_optimizer.ratio = 1')
        )
    if section.device == "nvme" and states.device == "cpu":
        rule = (
            "shards are the master weights, and offload_optimizer.device = cpu takes them into host"
            " memory"
        )
        problems.append(
            Problem(
                f"{path}.device",
                "nvme",
                rule,
                'set offload_optimizer.device = "nvme" or "none", or "cpu" here',
            )
        )
    if section.device == "nvme" and section.nvme_path is None:
        problems.append(
            Problem(f"{path}.device", "nvme", "no folder is given", f"set {path}.nvme_path")
        )
    refuse(problems)
    if states.device == "cpu" and stage > 0:
        return ParameterOffload(device="cpu", with_states=section.device != "cpu")
    if section.device == "nvme":
        return ParameterOffload(
            device="nvme",
            path=section.nvme_path,
            buffer_bytes=4 * section.buffer_size,
            buffer_count=section.buffer_count,
        )
    if states.device == "nvme" and stage in (1, 2):
        path_ = states.nvme_path
        size = 4 * states.buffer_size
        count = states.buffer_count
        return ParameterOffload(
            device="nvme",
            with_states=True,
            ratio=states.ratio,
            path=path_,
            buffer_bytes=size,
            buffer_count=count,
        )
    return ParameterOffload()
