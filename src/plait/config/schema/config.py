"""The one file, as types: DeepSpeed's top-level keys that mean something here, and the sections
`model`, `data`, `run`, `parallel`, `experts` and `faults`.

A `Config` may still say "auto" and may leave things out; `resolve` ends that. Keys of DeepSpeed
that Plait ignores are not fields: they are in the table `deepspeed`. Every key has one default,
DeepSpeed 0.19.8's, whatever else stands in the file; what `"Left out: ..."` derives, it derives
from keys of the same setting.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, PrivateAttr, Tag

from plait.cluster.nccl import Algorithms, Protocols
from plait.config.schema.experts import ExpertsSection
from plait.config.schema.faults import FaultsSection
from plait.config.schema.optimization import OptimizerSpec, SchedulerSpec
from plait.config.schema.provenance import Provenance
from plait.config.schema.sections import DataSection, ModelSection, RunSection
from plait.config.schema.trackers import (
    CometSection,
    CsvMonitorSection,
    TensorboardSection,
    WandbSection,
)
from plait.config.values.numbers import LARGEST, MOST_PROCESSES, Flag, LocalPlace
from plait.parallel.activations.selective import DEFAULT as DEFAULT_KEEP
from plait.policy import Policy
from plait.units import SHORT_NAMES

PLAIT_SECTIONS = ("model", "data", "run", "parallel", "experts", "faults")
"""A file without any of these is one that DeepSpeed takes too. No default depends on it."""


def _number(value: Any) -> Any:
    """Files write whole numbers as `5e8` and quote numbers; a truth value is not a number."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false; write the number")
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _dtype(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return {long: short for short, long in SHORT_NAMES.items()}.get(value.lower(), value.lower())


def _is_auto(value: Any) -> str:
    return "auto" if value == "auto" else "value"


Auto = Annotated[Literal["auto"], Tag("auto")]
Number = BeforeValidator(_number)

Count = Annotated[int, Field(ge=1, le=LARGEST), Number]
Degree = Annotated[int, Field(ge=1, le=MOST_PROCESSES), Number]
CountOrAuto = Annotated[Annotated[Count, Tag("value")] | Auto, Discriminator(_is_auto)]
PowerOrAuto = Annotated[
    Annotated[int, Field(ge=0, le=126), Number, Tag("value")] | Auto, Discriminator(_is_auto)
]
SizeOrAuto = Annotated[
    Annotated[float, Field(ge=0, allow_inf_nan=False), Number, Tag("value")] | Auto,
    Discriminator(_is_auto),
]
PositiveOrAuto = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=False), Number, Tag("value")] | Auto,
    Discriminator(_is_auto),
]
Compressions = Annotated[
    Annotated[Literal["none", "auto", "int8", "int4", "powersgd"], Tag("one")]
    | Annotated[
        Annotated[list[Literal["int8", "int4", "powersgd"]], Field(min_length=1)], Tag("several")
    ],
    Discriminator(lambda value: "several" if isinstance(value, list) else "one"),
]
FlagOrAuto = Annotated[Annotated[Flag, Tag("value")] | Auto, Discriminator(_is_auto)]


def _degree(value: Any) -> Any:
    return "auto" if value == -1 and not isinstance(value, bool) else value


FreeDegree = Annotated[
    Annotated[Degree, Tag("value")] | Auto, Discriminator(_is_auto), BeforeValidator(_degree)
]

DtypeName = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_dtype)]


class Fp16Section(Policy):
    """Computation in float16 with a loss scale. The parameters that the optimizer updates stay in
    their own dtype.
    """

    enabled: FlagOrAuto = False
    """Compute in float16. "auto": off, unless the caller (a Transformers TrainingArguments) says
    otherwise. The gradients of a step decide the loss scale of the next one, so on a GPU the
    program waits for the device once per step.
    """
    loss_scale: SizeOrAuto = 0.0
    """A constant loss scale; 0 adapts it to the gradients."""
    initial_scale_power: PowerOrAuto = 16
    """The first scale is 2 to this power."""
    loss_scale_window: CountOrAuto = 1000
    """Steps without overflow after which the scale doubles."""
    hysteresis: CountOrAuto = 2
    """The overflow that first halves the scale: 1 halves at the first, 2 forgives one."""
    consecutive_hysteresis: FlagOrAuto = False
    """Forgive again after every step without overflow, so that only overflows in a row count."""
    min_loss_scale: PositiveOrAuto = 1.0
    """The scale is not halved below this. An overflow there ends the run."""


class Bf16Section(Policy):
    """Computation in bfloat16. The parameters that the optimizer updates stay in their own
    dtype.
    """

    enabled: FlagOrAuto = False
    """Compute in bfloat16. "auto": off, unless the caller (a Transformers TrainingArguments) says
    otherwise.
    """
    check_grad_overflow: FlagOrAuto = True
    """Skip an optimizer step whose gradients are not finite. The program then reads the norm before
    the update, so on a GPU it waits for the device once per step; false saves the wait where
    non-finite gradients may end the run.
    """


class DataTypesSection(Policy):
    """Dtypes of what is kept between micro-batches."""

    grad_accum_dtype: DtypeName | None = None
    """What the gradients of a step's micro-batches are added up in. "fp32" makes their reduction
    float32 too, unless communication_data_type says otherwise; fp16 and bf16 ask for no more than
    what is done: shards are added up in float32.
    """
    keep_in_fp32_modules: list[str] | Literal["auto"] = "auto"
    """Modules that compute in float32 under fp16 and bf16: names as named_modules() has them, or
    their last parts, with * and ?. BatchNorm layers and what a Transformers model lists itself
    always do; "auto" adds nothing.
    """


class OffloadOptimizerSection(Policy):
    """Where optimizer states, gradients and master weights are stored."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """none: on the device. cpu: in host memory, for GPUs; the optimizer runs there. nvme: in files
    in `nvme_path`, read and written in chunks during the step; not for GPUs in this release.
    """
    pin_memory: Flag = True
    """cpu: pin the host memory, so that copies overlap with computation."""
    nvme_path: LocalPlace | None = None
    """nvme: a folder on a fast local disk."""
    buffer_count: Annotated[int, Field(ge=4, le=LARGEST), Number] = 4
    """nvme: chunks of the states that are in memory at once: those being read, one computed, those
    being written.
    """
    buffer_size: Count = 100_000_000
    """nvme: float32 elements of a chunk, parameters, gradients and states together."""
    ratio: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), Number] = 1.0
    """The share of the parameters that is offloaded: blocks from the first on, then the parameters
    outside of them, until it is reached. Master weights, gradients and states of the others stay on
    the device.
    """


class OffloadParamSection(Policy):
    """Where the shards of stage 3's parameters are stored, from which blocks are gathered. They are
    the master weights too: there is no other copy. At stages 1 and 2 the master weights are stored
    with the states of offload_optimizer.
    """

    device: Literal["none", "cpu", "nvme"] = "none"
    """none: on the device. cpu: in host memory, together with offload_optimizer.device = "cpu".
    nvme: in files in `nvme_path`, prefetched for the block that is gathered next and evicted after
    it; not for GPUs in this release.
    """
    nvme_path: LocalPlace | None = None
    """nvme: a folder on a fast local disk."""
    buffer_count: Annotated[int, Field(ge=2, le=LARGEST), Number] = 5
    """nvme: buffers in memory; together they hold the shards of the block that is gathered and of
    those that are read ahead.
    """
    buffer_size: Count = 100_000_000
    """nvme: float32 elements in a buffer."""


class ZeroSection(Policy):
    """What data-parallel processes share out instead of each holding all of it."""

    stage: Annotated[Literal[0, 1, 2, 3], Number] = 0
    """What is shared out: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too,
    gathered for use and freed.
    """
    offload_optimizer: OffloadOptimizerSection = OffloadOptimizerSection()
    """Optimizer states in host memory or in files."""
    offload_param: OffloadParamSection = OffloadParamSection()
    """Parameters in host memory or in files."""
    reduce_bucket_size: CountOrAuto | None = None
    """Elements in a reduction of gradients at stage 0 in the model's own dtype, the one case with
    buckets. "auto": the square of the hidden size. Left out: parallel.bucket_mib.
    """


class CompileSection(Policy):
    """torch.compile, a block of the model at a time."""

    enabled: FlagOrAuto = False
    """Compile. The first step takes longer."""
    backend: str = "inductor"
    """A backend that torch.compile knows."""
    mode: str | None = None
    """A mode of torch.compile, for example "max-autotune"."""


class PipelineSection(Policy):
    """How the pipeline's ranks take turns. Its micro-batches are the accumulation steps."""

    schedule: str | None = None
    """gpipe, 1f1b, interleaved-1f1b, looped-bfs, interleaved-zero-bubble, zbv or dualpipev; `plait
    schedule` draws them. Left out: 1f1b, or interleaved-1f1b where stages_per_rank is above 1.
    """
    stages_per_rank: Count | None = None
    """Stages of each rank. Left out: the schedule's own number."""
    blocks_per_stage: tuple[Count, ...] | None = None
    """Blocks of each stage. Left out: their predicted time is balanced, embedding and head counted.
    """


class CheckpointingSection(Policy):
    """How the inputs of recomputed blocks are kept: DeepSpeed's names. What is recomputed is set in
    parallel.recompute.
    """

    partition_activations: Flag = False
    """With tp: each process keeps its slice of a recomputed block's input, and gathers the full
    input in backward.
    """
    cpu_checkpointing: Flag = False
    """Keep the inputs of recomputed blocks in host memory: parallel.activation_offload with
    fraction 1.
    """


class RecomputeSection(Policy):
    """Activation checkpointing: compute again in backward what forward does not keep."""

    mode: Literal["none", "full", "selective", "budget"] | None = None
    """none; full: a block keeps its input alone; selective: it keeps the results of the operators
    in `keep` too; budget: chosen for every block, so that activations fit in `budget_gib`. Left
    out: budget where `budget_gib` is given, else none.
    """
    every: Count = 1
    """full and selective: every n-th block, the first included."""
    keep: tuple[str, ...] = DEFAULT_KEEP
    """selective and budget: results that are kept: `attention`, `matmul` (products with weights),
    `every_second_matmul`, or operators like `aten.mm`.
    """
    budget_gib: Annotated[float, Field(gt=0, allow_inf_nan=False), Number] | None = None
    """The most GiB that activations take on a process: what blocks, head and loss keep, and the
    block that is being recomputed. Of one micro-batch; in a pipeline of all that are in flight
    there, and every rank chooses for itself.
    """
    sequence_length: Count | None = None
    """budget: tokens of a sequence. Left out: data.sequence_length."""


class ActivationOffloadSection(Policy):
    """Where blocks put what they save for backward: out of the device's memory."""

    fraction: Annotated[float, Field(ge=0, le=1), Number] = 0.0
    """The share of blocks that do, from the first one on: their backward comes last, so there is
    most time for both transfers.
    """
    device: Literal["cpu", "disk"] = "cpu"
    """cpu: pinned host memory, for GPUs. disk: files in `path`."""
    path: LocalPlace | None = None
    """disk: a folder on a fast local disk."""


class ParallelSection(Policy):
    """How many processes each kind of parallelism takes. The product of the degrees is the number
    of processes.
    """

    pp: Degree = 1
    """Processes that hold consecutive blocks of the model each."""
    pipeline: PipelineSection = PipelineSection()
    """With pp: the schedule and the stages."""
    dp_replicate: FreeDegree | None = None
    """Copies of the sharded model. Left out, -1 or "auto": the processes that remain; at stage 0
    all of data parallelism.
    """
    dp_shard: FreeDegree | None = None
    """Processes over which ZeRO shards, stages 1 to 3. Left out, -1 or "auto": the processes that
    remain.
    """
    cp: Degree = 1
    """Processes that have a part of each sequence."""
    context: Literal["all-gather-kv", "ulysses", "ring"] = "all-gather-kv"
    """With cp: how attention sees the other parts. all-gather-kv: keys and values of all parts are
    gathered. ring: they go from process to process, so that only one other part is in memory.
    ulysses: processes exchange heads for tokens, which sends least where there are many key-value
    heads; cp must divide the query heads.
    """
    ep: Degree = 1
    """Of the data-parallel processes, how many have different experts of a mixture-of-experts
    model; tokens are sent to the experts that they are routed to. A divisor of dp_replicate x
    dp_shard and of the number of experts. Takes neighbouring ranks.
    """
    tp: Degree = 1
    """Processes that share every matrix product. Takes neighbouring ranks, which have the fastest
    links.
    """
    sequence_parallel: Flag = False
    """With tp: shard norms and the residual stream along the sequence too."""
    tensor_overlap: Annotated[int, Field(ge=0, le=64), Number] = 0
    """With tp: chunks in which a row-parallel product is computed; the all-reduce of one overlaps
    with the product of the next. The gradients of inputs are then summed while those of weights are
    computed. For links that a step waits for; 0: sums are waited for.
    """
    loss_parallel: Flag = True
    """With tp: leave logits split over the vocabulary in the loss, so that full logits are never
    allocated in training.
    """
    plan: dict[str, str] | None = None
    """With tp: module pattern (`blocks.*.up`) to style (`colwise`, `rowwise`,
    `colwise_gather_output`, `rowwise_split_input`, `embedding_rowwise`, `vocab_head`,
    `replicated_with_grad_allreduce`). Left out: the model family's own plan.
    """
    blocks: tuple[str, ...] = ()
    """Names or patterns (`model.layers.*`) of the repeated blocks that are sharded and compiled one
    by one. Left out: the longest list of equal modules in the model.
    """
    bucket_mib: PositiveOrAuto = "auto"
    """MiB of gradients in a reduction at stage 0 in the model's own dtype, the one case with
    buckets. "auto": what the measured links make the cheapest, and 25 where none are known.
    """
    loss_chunk_tokens: Annotated[int, Field(ge=0, le=LARGEST), Number] = 0
    """Compute head and cross entropy for this many tokens at a time, so that full logits are never
    allocated; 0: all at once. For language models with plait.causal_lm_loss.
    """
    mlp_tile_tokens: Annotated[int, Field(ge=0, le=LARGEST), Number] = 0
    """Compute the MLP of every block, and its experts, for this many tokens at a time, and again in
    the backward, so that their activations exist for one tile; 0: all at once. For MLPs that
    compute every token from itself.
    """
    recompute: RecomputeSection = RecomputeSection()
    """Activation checkpointing."""
    activation_offload: ActivationOffloadSection = ActivationOffloadSection()
    """Activations in host memory or on disk."""
    unused_parameters: FlagOrAuto = True
    """Let a step leave parameters unused, also different ones on different processes."""
    transport: Literal["auto", "torch", "shared-memory"] = "auto"
    """How gradients and parameters move between data-parallel processes: "torch" by its collectives
    (gloo, NCCL), "shared-memory" through memory that the processes of one machine share, for
    tensors on the CPU. "auto": shared memory where a group's processes have it.
    """
    all_reduce: Literal[
        "auto",
        "all-reduce",
        "reduce-scatter+all-gather",
        "hierarchical",
        "ring",
        "recursive-doubling",
    ] = "auto"
    """The all-reduce algorithm of gradients at stage 0 in the model's own dtype. "auto": shared
    memory, or the cheapest algorithm by the measured links. Where none were measured, hierarchical
    (intra-node, inter-node, intra-node) if the processes span machines with several of them each,
    else the backend's own all-reduce, which on GPUs chooses its own ring or tree.
    """
    measure_seconds: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False), Number] = 1.0
    """About how long "auto" in all_reduce measures the links of the run's own processes when it
    starts, where they share no memory. 0: it does not, and decides by the machines.
    """
    compress_gradients: Compressions = "none"
    """Compression of gradients between data-parallel processes: 8 or 4 bits per element with a
    scale every 256, or at stage 0 two low-rank factors of every matrix. It changes the training
    slightly; for links that are slower than the computation. A list: the allowed candidates; the
    first steps are uncompressed, then each candidate runs a few steps, and one that makes a step 5
    % shorter is activated, a lossier one only if it saves another 5 %. "auto" is ["int8", "int4"].
    """
    compress_weights: Literal["none", "int8", "int4"] = "none"
    """Stages 1 to 3: the compression of parameters when they are gathered."""
    error_feedback: FlagOrAuto = "auto"
    """With compress_gradients: add what a step lost to the next step's gradients. "auto": at stage
    0, where it costs as much memory as the gradients; at stages 1 to 3 it would cost that of
    unsharded gradients. PowerSGD always does.
    """
    powersgd_rank: Count = 4
    """Columns of PowerSGD's factors."""
    nccl_algorithm: Algorithms = None
    """On GPUs: the algorithms that NCCL may take (NCCL_ALGO), such as "Ring" or "^Tree". Left out:
    NCCL decides for every call.
    """
    nccl_protocol: Protocols = None
    """On GPUs: the protocols that NCCL may take (NCCL_PROTO): LL, LL128, Simple. Left out: NCCL
    decides for every call.
    """
    optimizer_in_backward: Flag = False
    """Update every parameter as soon as its gradient is complete and free the gradient, so that
    those of one block exist at a time. Without accumulation, clipping, float16 and overflow checks,
    which need all gradients first.
    """
    secondary_partition: Annotated[int, Field(ge=0, le=MOST_PROCESSES), Number] = 0
    """Stage 3: from a block's forward to its backward, keep its parameters sharded over this many
    neighbouring processes (those of a machine), so that the backward gathers from them and not from
    all. 0: off.
    """


class Config(Policy):
    """Everything that a file can contain."""

    train_batch_size: CountOrAuto | None = None
    """Samples in an optimizer step, over all processes: micro batch x accumulation x data-parallel
    processes. Give any two of the three.
    """
    train_micro_batch_size_per_gpu: CountOrAuto | None = None
    """Samples in one forward and backward pass of one data-parallel process."""
    gradient_accumulation_steps: CountOrAuto | None = None
    """Forward and backward passes in an optimizer step."""
    gradient_clipping: SizeOrAuto = 1.0
    """The largest norm of all gradients together; 0 does not clip. "auto": 1.0."""
    communication_data_type: DtypeName | None = None
    """The dtype of the reduction of gradients. Left out: the dtype of the computation, as in
    DeepSpeed; "fp32" sums bf16 and fp16 gradients without rounding them, for twice the bytes.
    """
    data_parallel_size: Count | None = None
    """A check: the data-parallel processes that result (dp_replicate x dp_shard) must be this many.
    """
    num_layers: Count | None = None
    """A check, by Megatron's name: the layers of the model, of which every pipeline stage needs
    one.
    """
    zero_optimization: ZeroSection = ZeroSection()
    """ZeRO."""
    fp16: Fp16Section = Fp16Section()
    """float16."""
    bf16: Bf16Section = Bf16Section()
    """bfloat16."""
    data_types: DataTypesSection = DataTypesSection()
    """Dtypes of what is kept."""
    optimizer: OptimizerSpec | None = None
    """The optimizer. Left out: AdamW with its defaults."""
    scheduler: SchedulerSpec | None = None
    """The schedule of the learning rate. Left out: constant."""
    compile: CompileSection = CompileSection()
    """torch.compile."""
    activation_checkpointing: CheckpointingSection = CheckpointingSection()
    """How inputs of recomputed blocks are kept."""
    parallel: ParallelSection = ParallelSection()
    """The layout."""
    experts: ExpertsSection = ExpertsSection()
    """Routers of mixture-of-experts models."""
    faults: FaultsSection = FaultsSection()
    """Hangs, and numbers that are not finite."""
    tensorboard: TensorboardSection = TensorboardSection()
    """TensorBoard."""
    wandb: WandbSection = WandbSection()
    """Weights & Biases."""
    comet: CometSection = CometSection()
    """Comet."""
    csv_monitor: CsvMonitorSection = CsvMonitorSection()
    """CSV files."""
    model: ModelSection | None = None
    """The model that `plait train` builds."""
    data: DataSection | None = None
    """The text that `plait train` reads."""
    run: RunSection | None = None
    """How long `plait train` runs, and what it writes."""

    _provenance: Provenance = PrivateAttr(default_factory=Provenance)

    @property
    def provenance(self) -> Provenance:
        """Where the values came from, and what the file's keys mean."""
        return self._provenance

    def with_provenance(self, provenance: Provenance) -> Self:
        """The same, knowing where it came from."""
        copy = self.model_copy()
        copy._provenance = provenance
        return copy

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed takes such a file too: no section of Plait's was given."""
        if self._provenance.deepspeed is not None:
            return self._provenance.deepspeed
        return not self.model_fields_set & set(PLAIT_SECTIONS)

    def value(self, path: str) -> Any:
        """The value of a field, by its dotted path; None where its section is left out."""
        here: Any = self
        for name in path.split("."):
            here = getattr(here, name, None)
        return here

    def origin(self, path: str) -> str:
        """Where the value of a field came from, by its dotted path: "file", "override", "default",
        ...
        """
        if self._provenance.deepspeed is not None:
            parts = path.split(".")
            known = (
                self._provenance.origins.get(".".join(parts[:length]))
                for length in range(len(parts), 0, -1)
            )
            return next((origin for origin in known if origin), "default")
        here: Any = self
        for name in path.split("."):
            given = (
                here.model_fields_set
                if isinstance(here, Policy)
                else here
                if isinstance(here, dict)
                else ()
            )
            if name not in given:
                return "default"
            here = here[name] if isinstance(here, dict) else getattr(here, name)
        return "given"
