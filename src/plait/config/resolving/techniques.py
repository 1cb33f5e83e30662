"""Resolution of the techniques that a file configures.

The functions have the form that `resolved_parts` describes. `refuse_...` functions check
combinations of techniques; they run after the parts have been resolved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from plait.cluster.layout import Layout
from plait.comm.all_reduce import Name
from plait.config.resolving.resolved_parts import (
    CALLER_SOURCE,
    MICRO_KEY,
    Batch,
    Findings,
    described,
)
from plait.config.schema import optimizers
from plait.config.schema.config import Config, ZeroSection
from plait.config.schema.optimization import OptimizerSpec
from plait.errors import ConfigError, Problem, raise_problems
from plait.names import suggest_names
from plait.parallel.accounting.compression_scheme import Scheme
from plait.parallel.activations import selective
from plait.parallel.schedules.schedule import SCHEDULES
from plait.parallel.techniques.context_parallel import ContextParallel
from plait.parallel.techniques.data_collectives import Compression
from plait.parallel.techniques.data_parallel import DataParallel
from plait.parallel.techniques.mixed_precision import Precision
from plait.parallel.techniques.offload import ActivationOffload, OptimizerOffload, ParameterOffload
from plait.parallel.techniques.pipeline_parallel import Pipeline
from plait.parallel.techniques.recompute import Recompute
from plait.parallel.techniques.tensor_parallel import TensorParallel
from plait.sizes import GIB, MIB, dtype_of

_TIERS = {"none": "the device", "cpu": "the host", "nvme": "disk"}

DEFAULT_BUCKET_BYTES = 25 * MIB
"""Bucket size of DistributedDataParallel."""
_SCHEMES = ("int8", "int4", "powersgd")
"""Compression schemes, from the least to the most lossy."""
_BY_GROUP = ": auto, decided by each group when it is created"
_BITS: Mapping[str, Literal[4, 8]] = {"int8": 8, "int4": 4}


def tensor_parallel(findings: Findings) -> TensorParallel:
    """Return the settings of tensor parallelism."""
    section = findings.config.parallel
    # The fields have the names of the settings.
    names = tuple(TensorParallel.model_fields)
    if section.tp == 1:
        findings.not_used((f"parallel.{name}" for name in names), "tp is 1")
    return TensorParallel(**{name: getattr(section, name) for name in names})


def context_parallel(findings: Findings) -> ContextParallel:
    """Return the settings of context parallelism."""
    section = findings.config.parallel
    if section.cp == 1:
        findings.not_used(("parallel.context",), "cp is 1")
    return ContextParallel(context=section.context)


def _refuse(
    path: str, value: object, rules: Iterable[tuple[bool, str, str]], *, fallback: str
) -> None:
    """Record a problem for every rule that a setting violates.

    Args:
        path: Path of the setting.
        value: Value of the setting.
        rules: Triples (applies, rule, remedy).
        fallback: Value of the setting that is always possible.

    Raises:
        ConfigError: At least one rule applies.
    """
    problems = []
    for applies, rule, remedy in rules:
        if applies:
            problems.append(Problem(path, value, rule, f"{remedy}, or {fallback}"))
    raise_problems(problems)


def refuse_overlap(tensor: TensorParallel, pipeline: Pipeline, layout: Layout) -> None:
    """Refuse settings that cannot be combined with overlapped all-reduces.

    Raises:
        ConfigError: Such settings exist. The error lists all of them.
    """
    if layout.tp == 1 or not tensor.tensor_overlap:
        return
    # An unknown schedule is a problem of its own.
    schedule = SCHEDULES.get(pipeline.schedule)
    splits = layout.pp > 1 and schedule is not None and schedule.splits_backward
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
    _refuse("parallel.tensor_overlap", tensor.tensor_overlap, rules, fallback="0")


def pipeline(findings: Findings, layout: Layout) -> Pipeline:
    """Return the settings of pipeline parallelism.

    `Pipeline.check` tests later whether the schedule supports the number of stages, which depends
    on the model.
    """
    section = findings.config.parallel.pipeline
    path = "parallel.pipeline"
    if layout.pp == 1:
        findings.not_used([f"{path}.{name}" for name in type(section).model_fields], "pp is 1")

    schedule = section.schedule
    if schedule is None and section.stages_per_rank is not None and section.stages_per_rank > 1:
        schedule = "interleaved-1f1b"
        findings.sources[f"{path}.schedule"] = f"derived: {section.stages_per_rank} stages per rank"
    elif schedule is None:
        schedule = "1f1b"

    if schedule not in SCHEDULES:
        rule = "is not a pipeline schedule that Plait runs"
        findings.problems.append(
            Problem(f"{path}.schedule", schedule, rule, suggest_names(schedule, SCHEDULES))
        )
    return Pipeline(
        schedule=schedule,
        stages_per_rank=section.stages_per_rank,
        blocks_per_stage=section.blocks_per_stage,
    )


def data_parallel(
    findings: Findings,
    dtypes: Precision,
    scheme: Scheme,
    *,
    shard: int | None,
    hidden_size: int | None,
) -> DataParallel:
    """Return the ZeRO stage and the reduction of gradients.

    Args:
        findings: Sources and problems.
        dtypes: Resolved dtypes.
        scheme: Resolved compression.
        shard: Number of processes that shard the parameters, or None if the layout is impossible.
        hidden_size: Hidden size from the caller, for an "auto" bucket. If None, that of
            `model.config`.
    """
    parallel = findings.config.parallel
    unused = findings.resolve_auto(
        "parallel.unused_parameters", parallel.unused_parameters, True, "DeepSpeed's default"
    )
    # The model of the caller is more certain than a description in the file.
    hidden_size = hidden_size or described(findings.config, "hidden_size", "n_embd")
    bucket_bytes = _bucket_bytes(findings, dtypes, hidden_size)
    return DataParallel(
        stage=findings.config.zero_optimization.stage,
        bucket_bytes=bucket_bytes or scheme.bucket_bytes(DEFAULT_BUCKET_BYTES),
        bucket_by_links=bucket_bytes is None,
        unused_parameters=unused,
        transport=_transport(findings),
        all_reduce=_all_reduce(findings),
        measure_seconds=parallel.measure_seconds,
        secondary_partition=_secondary_partition(findings, shard),
        update_in_backward=parallel.optimizer_in_backward,
    )


def _transport(
    findings: Findings,
) -> Literal["torch", "shared-memory", "prefer-shared-memory"]:
    transport = findings.config.parallel.transport
    check_collectives = findings.config.faults.check_collectives
    if check_collectives and transport == "shared-memory":
        raise ConfigError(
            Problem(
                "faults.check_collectives",
                True,
                "parallel.transport is shared-memory, whose exchanges torch does not see",
                'set parallel.transport = "torch", or set this to false',
            )
        )
    if transport == "auto":
        findings.sources["parallel.transport"] += _BY_GROUP
    # The check sees only torch's collectives.
    if check_collectives:
        return "torch"
    return "prefer-shared-memory" if transport == "auto" else transport


def _all_reduce(findings: Findings) -> Name | Literal["by-machines"]:
    algorithm = findings.config.parallel.all_reduce
    path = "parallel.all_reduce"
    if algorithm == "auto":
        findings.sources[path] += _BY_GROUP
        return "by-machines"
    stage = findings.config.zero_optimization.stage
    if findings.config.parallel.transport == "shared-memory" and stage == 0:
        raise ConfigError(
            Problem(
                path,
                algorithm,
                "parallel.transport is shared-memory, which has its own all-reduce",
                'set one of the two to "auto"',
            )
        )
    return algorithm


def compression(findings: Findings, dtypes: Precision) -> Compression:
    """Return the initial gradient compression of a run, with the candidates for later steps."""
    parallel = findings.config.parallel
    stage = findings.config.zero_optimization.stage
    gradients = parallel.compress_gradients
    _check_compression(findings, dtypes)

    default = stage == 0
    rule = "stage 0"
    if stage > 0:
        rule = f"stage {stage}, where it would hold full gradients"
    feedback = findings.resolve_auto(
        "parallel.error_feedback", parallel.error_feedback, default, rule
    )
    # A step that may be skipped must not change the residuals of the compression.
    revocable = (
        dtypes.check_overflow
        or dtypes.loss_scale is not None
        or findings.config.faults.non_finite == "skip"
    )

    def build_scheme(name: str, weights: str = "none") -> Scheme:
        bits = _BITS.get(name, 0)
        return Scheme(
            gradient_bits=bits,
            weight_bits=_BITS.get(weights, 0),
            powersgd_rank=parallel.powersgd_rank if name == "powersgd" else 0,
            # PowerSGD has error feedback of its own.
            error_feedback=bool(feedback) and bits > 0,
            revocable=revocable,
        )

    allowed: list[str] = []
    initial = "none"
    if isinstance(gradients, list):
        allowed = list(gradients)
    elif gradients == "auto":
        allowed = ["int8", "int4"]
    else:
        initial = gradients
    return Compression(
        scheme=build_scheme(initial, parallel.compress_weights if stage else "none"),
        # From the least lossy one on, because a lossier one has to save more time.
        candidates=tuple(build_scheme(name) for name in _SCHEMES if name in allowed),
    )


def _check_compression(findings: Findings, dtypes: Precision) -> None:
    """Refuse compressed gradients where the reduction does not support them."""
    parallel = findings.config.parallel
    stage = findings.config.zero_optimization.stage
    gradients = parallel.compress_gradients
    path = "parallel.compress_gradients"
    # PowerSGD needs full matrices, of which a rank of stages 1 to 3 reduces only shards.
    schemes = gradients if isinstance(gradients, list) else [gradients]
    is_mixed = dtypes.compute is not None
    if stage and "powersgd" in schemes:
        remedy = 'use "int8", or zero_optimization.stage 0'
        if is_mixed:
            remedy += " in the model's own dtype"
        raise ConfigError(
            Problem(
                path,
                gradients,
                f"factors a matrix's full gradient, and ZeRO stage {stage} reduces it in shards",
                remedy,
            )
        )

    decided_at_start = gradients == "auto" or isinstance(gradients, list)
    if decided_at_start and not stage and parallel.all_reduce != "auto":
        raise ConfigError(
            Problem(
                path,
                gradients,
                f"parallel.all_reduce is {parallel.all_reduce}, which leaves nothing to decide",
                'set parallel.all_reduce = "auto", or this to "int8" or "none"',
            )
        )

    buckets = has_buckets(stage, mixed=is_mixed)
    # FSDP reduces replicated parameters that are cast, with its own all-reduce.
    if gradients != "none" and stage == 0 and not buckets:
        remedy = "use zero_optimization.stage 1, or compute in the model's own dtype"
        if "powersgd" in schemes:
            remedy = (
                'compute in the model\'s own dtype, or use "int8" with zero_optimization.stage 1'
            )
        raise ConfigError(
            Problem(
                path,
                gradients,
                "at ZeRO stage 0 with bf16 or fp16, torch reduces gradients block by block and"
                " cannot be given another collective",
                remedy,
            )
        )


def refuse_in_backward(
    data: DataParallel,
    compressed: Compression,
    layout: Layout,
    batch: Batch,
    precision: Precision,
    states: OptimizerOffload,
    *,
    clipping: float,
    non_finite: str,
) -> None:
    """Refuse settings that do not work with an optimizer update during the backward pass.

    These settings need all gradients before the first update, or the combination is not tested.

    Raises:
        ConfigError: At least one of these settings is used. The error lists all that are.
    """
    if not data.update_in_backward:
        return
    # At stage 0 gradients are reduced in buckets, which stay allocated.
    replicated = data.stage == 0 and layout.dp > 1
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
                "bf16.check_grad_overflow checks that all gradients are finite before the first"
                " update"
            ),
            "set bf16.check_grad_overflow = false",
        ),
        (
            non_finite != "auto",
            (
                f"faults.non_finite is {non_finite!r}, which checks that all gradients are finite"
                " before the first update"
            ),
            'set faults.non_finite = "auto"',
        ),
        (
            replicated,
            (
                f"{layout.dp} processes at ZeRO stage 0 reduce gradients in buckets, which stay"
                " allocated: an early update would free no memory"
            ),
            "use zero_optimization.stage 1 to 3",
        ),
        (
            data.unused_parameters and layout.dp > 1 and not replicated,
            (
                "parallel.unused_parameters determines after the backward which parameters no rank"
                " has used"
            ),
            "set parallel.unused_parameters = false, if every step uses every parameter",
        ),
        (
            layout.pp > 1,
            (
                f"parallel.pp is {layout.pp}: a stage adds up the gradients of all micro-batches of"
                " a step, and those of tied parameters are summed over their stages at its end"
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
            "it is not tested with compressed gradients",
            'set parallel.compress_gradients = "none"',
        ),
    )
    _refuse("parallel.optimizer_in_backward", True, rules, fallback="false")


def refuse_unsharded_optimizer(
    spec: OptimizerSpec, data: DataParallel, dtypes: Precision, layout: Layout
) -> None:
    """Refuse a torch optimizer whose first step fails on sharded parameters.

    Raises:
        ConfigError: The parameters are sharded, and the optimizer does not support it.
    """
    reason = optimizers.NOT_SHARDED.get(spec.type)
    if reason is None:
        return
    if data.stage:
        cause = f"zero_optimization.stage = {data.stage}"
    elif layout.tp > 1:
        cause = f"parallel.tp = {layout.tp}"
    elif dtypes.compute:
        cause = f"precision.compute = {dtypes.compute}"
    else:
        return
    raise ConfigError(
        Problem(
            "optimizer.type",
            spec.type,
            f"{reason}, which torch cannot do on sharded parameters, and {cause} shards them",
            "use AdamW, or zero_optimization.stage 0 without tensor parallelism, bf16 and fp16",
        )
    )


def refuse_small_states(spec: OptimizerSpec, data: DataParallel, offload: OptimizerOffload) -> None:
    """Refuse settings with which low-precision optimizer states are not tested.

    Raises:
        ConfigError: Such settings exist. The error lists all of them.
    """
    if spec.states is None:
        return
    rules = (
        (
            offload.device != "none",
            f"offload_optimizer.device is {offload.device}, with which it is not tested",
            'use device "none"',
        ),
        (
            data.update_in_backward,
            "parallel.optimizer_in_backward is true, with which it is not tested",
            "set that to false",
        ),
    )
    _refuse("optimizer.states", spec.states, rules, fallback="leave it out")


def _secondary_partition(findings: Findings, shard: int | None) -> int:
    """Return the number of ranks of the secondary partition, or 0 for none.

    Args:
        findings: Configuration that is resolved.
        shard: Number of ranks over which the parameters are sharded. None if the layout is
            impossible, which is reported separately.
    """
    size = findings.config.parallel.secondary_partition
    if shard is None:
        return size
    # A partition over all processes that shard would be the primary one.
    if size in (0, 1) or findings.config.zero_optimization.stage < 3 or size == shard:
        return 0
    if size > shard or shard % size:
        divisors = [str(degree) for degree in range(2, shard + 1) if shard % degree == 0]
        raise ConfigError(
            Problem(
                "parallel.secondary_partition",
                size,
                f"does not divide parallel.dp_shard, which is {shard}",
                f"use {', '.join(divisors) or '0'}",
            )
        )
    return size


def _bucket_bytes(findings: Findings, dtypes: Precision, hidden_size: int | None) -> int | None:
    """Return the bytes of a gradient bucket, or None if they are chosen from measured links."""
    mib = findings.config.parallel.bucket_mib
    bytes_of_mib = None if mib == "auto" else round(mib * MIB)
    path = "zero_optimization.reduce_bucket_size"
    elements = findings.config.zero_optimization.reduce_bucket_size
    source = findings.sources[path]
    if elements == "auto" and path in findings.auto:
        elements = findings.auto[path]
        source = "auto: the caller's"
    elif elements == "auto":
        # As Transformers fills in an "auto" of DeepSpeed.
        elements = None if hidden_size is None else hidden_size**2
        source = f"auto: hidden size {hidden_size} squared"

    stage = findings.config.zero_optimization.stage
    if not has_buckets(stage, mixed=dtypes.compute is not None):
        findings.sources["parallel.bucket_mib"] = "not used: gradients are reduced block by block"
        return bytes_of_mib
    if elements is None:
        if bytes_of_mib is None:
            findings.sources["parallel.bucket_mib"] += (
                f": auto, {DEFAULT_BUCKET_BYTES // MIB} unless the links are known"
            )
        return bytes_of_mib

    # DeepSpeed's key counts elements of the dtype in which gradients are reduced.
    itemsize = dtype_of(dtypes.reduce or "float32").itemsize
    bucket_bytes = int(elements) * itemsize
    if bytes_of_mib is not None and bucket_bytes != bytes_of_mib:
        raise ConfigError(
            Problem(
                f"{path} = {elements} and parallel.bucket_mib = {mib:g}",
                None,
                f"both set the bucket and disagree: {elements} x {itemsize} bytes ="
                f" {bucket_bytes / MIB:g} MiB",
                "keep one of them",
            )
        )
    findings.sources["parallel.bucket_mib"] = f"{source}: {path}, {elements} x {itemsize} bytes"
    return bucket_bytes


def has_buckets(stage: int, *, mixed: bool) -> bool:
    """Return True if gradients are reduced in buckets rather than per block.

    Args:
        stage: ZeRO stage.
        mixed: Whether the model computes in another dtype than that of its parameters.
    """
    return stage == 0 and not mixed


def recompute(findings: Findings) -> Recompute:
    """Return the settings of activation checkpointing."""
    section = findings.config.parallel.recompute
    path = "parallel.recompute"
    mode = section.mode
    if mode is None and section.budget_gib is not None:
        mode = "budget"
        findings.sources[f"{path}.mode"] = f"derived: {path}.budget_gib is given"
    elif mode is None:
        mode = "none"

    sequence_length = section.sequence_length
    data = findings.config.data
    # No other mode depends on the length.
    if sequence_length is None and mode == "budget" and data is not None:
        sequence_length = data.sequence_length
        findings.sources[f"{path}.sequence_length"] = "derived: data.sequence_length"

    # Raises ConfigError for an unknown operator.
    selective.kept_operators(section.keep)
    rules = (
        (
            mode == "budget" and section.budget_gib is None,
            Problem(f"{path}.mode", "budget", "no budget is given", f"set {path}.budget_gib"),
        ),
        (
            mode != "budget" and section.budget_gib is not None,
            Problem(
                f"{path}.budget_gib",
                section.budget_gib,
                f"the mode is {mode}, which does not depend on a budget",
                f'leave it out, or set {path}.mode = "budget"',
            ),
        ),
        (
            mode == "budget" and sequence_length is None,
            Problem(
                f"{path}.sequence_length",
                None,
                "activations grow with it, and neither it nor data.sequence_length is given",
                "write the number of tokens of the longest sequence",
            ),
        ),
        (
            mode == "budget" and findings.sources.get(MICRO_KEY) == CALLER_SOURCE,
            Problem(
                f"{path}.mode",
                "budget",
                "activations grow with the micro-batch, but the file gives no batch size",
                "set train_micro_batch_size_per_gpu",
            ),
        ),
    )
    raise_problems(problem for applies, problem in rules if applies)

    # Without recomputation no block has a checkpointed input, in DeepSpeed as here.
    partition = findings.config.activation_checkpointing.partition_activations
    return Recompute(
        mode=mode,
        every=section.every,
        keep=section.keep,
        budget_bytes=round((section.budget_gib or 0) * GIB),
        sequence_length=sequence_length or 0,
        partition_inputs=partition and mode != "none",
    )


def recomputes(config: Config) -> bool:
    """Return True if any block is recomputed.

    Otherwise the section `activation_checkpointing` has no effect, as in DeepSpeed, because no
    block has a checkpointed input.
    """
    section = config.parallel.recompute
    return section.mode not in (None, "none") or section.budget_gib is not None


def activation_offload(findings: Findings) -> ActivationOffload:
    """Return the settings of activation offload."""
    config = findings.config
    section = config.parallel.activation_offload
    path = "parallel.activation_offload"
    fraction = section.fraction
    problems = []
    if config.activation_checkpointing.cpu_checkpointing and recomputes(config):
        name = "activation_checkpointing.cpu_checkpointing"
        sets_fraction = config.origin(f"{path}.fraction") != "default"
        if (sets_fraction and fraction != 1) or section.device != "cpu":
            problems.append(
                Problem(
                    name,
                    "true",
                    f"it means {path}.fraction = 1 on cpu, but the file sets {fraction:g} on"
                    f" {section.device}",
                    "keep one of them",
                )
            )
        # DeepSpeed's key has no fraction: it moves the inputs of all recomputed blocks.
        fraction = 1.0
        findings.sources[f"{path}.fraction"] = f"{config.origin(name)}: {name}"

    if fraction and section.device == "disk" and section.path is None:
        problems.append(Problem(f"{path}.device", "disk", "no folder is given", f"set {path}.path"))
    raise_problems(problems)
    return ActivationOffload(
        fraction=fraction,
        device=section.device,
        path=section.path if section.device == "disk" else None,
    )


def optimizer_offload(findings: Findings) -> OptimizerOffload:
    """Return the storage tier of optimizer states and gradients."""
    section = findings.config.zero_optimization.offload_optimizer
    path = "zero_optimization.offload_optimizer"
    if section.device == "none":
        return OptimizerOffload()

    problems = []
    if section.device == "nvme" and section.nvme_path is None:
        problems.append(
            Problem(f"{path}.device", "nvme", "no folder is given", f"set {path}.nvme_path")
        )
    if findings.config.zero_optimization.stage == 0:
        problems.append(
            Problem(
                f"{path}.device",
                section.device,
                "ZeRO stage 0 keeps full optimizer states on every process",
                "set zero_optimization.stage to 1, 2 or 3",
            )
        )
    raise_problems(problems)

    # Files are mapped, so only host memory is pinned.
    if section.device == "cpu":
        return OptimizerOffload(device="cpu", pin_memory=section.pin_memory, ratio=section.ratio)
    return OptimizerOffload(
        device="nvme",
        path=section.nvme_path,
        # The key counts float32 elements.
        buffer_bytes=4 * section.buffer_size,
        buffer_count=section.buffer_count,
        ratio=section.ratio,
    )


def parameter_offload(findings: Findings) -> ParameterOffload:
    """Return the storage tier of the parameter shards, which are the master weights."""
    zero = findings.config.zero_optimization
    section = zero.offload_param
    states = zero.offload_optimizer
    raise_problems(_parameter_offload_problems(zero))

    # The optimizer updates the master weights where its states are.
    if states.device == "cpu" and zero.stage > 0:
        return ParameterOffload(device="cpu", with_states=section.device != "cpu")
    if section.device == "nvme":
        return ParameterOffload(
            device="nvme",
            path=section.nvme_path,
            buffer_bytes=4 * section.buffer_size,
            buffer_count=section.buffer_count,
        )
    if states.device == "nvme" and zero.stage in (1, 2):
        return ParameterOffload(
            device="nvme",
            with_states=True,
            ratio=states.ratio,
            path=states.nvme_path,
            buffer_bytes=4 * states.buffer_size,
            buffer_count=states.buffer_count,
        )
    return ParameterOffload()


def _parameter_offload_problems(zero: ZeroSection) -> list[Problem]:
    section = zero.offload_param
    states = zero.offload_optimizer
    rules = (
        (
            section.device != "none" and zero.stage != 3,
            f"stage {zero.stage} keeps parameters unsharded during a step",
            'set zero_optimization.stage to 3, or "none"',
        ),
        # The rules below exist because the shards are the master weights.
        (
            section.device == "cpu" and states.device != "cpu",
            "shards are the master weights, which the optimizer updates where its states are,"
            f" and those are on {_TIERS[states.device]}",
            'set zero_optimization.offload_optimizer.device = "cpu", or "none"',
        ),
        (
            section.device == "cpu" and states.ratio < 1,
            "parameters are the master weights, and offload_optimizer.ratio leaves part of them"
            " on the device",
            'use "none", or offload_optimizer.ratio = 1',
        ),
        (
            section.device == "nvme" and states.device == "cpu",
            "shards are the master weights, and offload_optimizer.device = cpu takes them into"
            " host memory",
            'set offload_optimizer.device = "nvme" (with a nvme_path) or "none", or "cpu" here',
        ),
        (
            section.device == "nvme" and section.nvme_path is None,
            "no folder is given",
            "set zero_optimization.offload_param.nvme_path",
        ),
    )
    problems: list[Problem] = []
    for applies, rule, remedy in rules:
        if applies:
            problems.append(
                Problem("zero_optimization.offload_param.device", section.device, rule, remedy)
            )
    return problems
