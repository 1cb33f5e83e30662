"""Schema of the configuration file: the `Config` model and the sections that DeepSpeed also has.

A `Config` may contain "auto" and may omit keys; `resolve` replaces both. It records its provenance:
the keys of its file as they were written. DeepSpeed keys that Plait ignores are not fields of the
schema. They are listed in `config.dialects.deepspeed`.

The attribute docstrings are the users' reference. They appear as descriptions in the JSON schema
(`plait config schema`), and `plait config explain` prints the first sentence of each. A prefix
such as "nvme:" or "tp:" names the value or the degree without which the key has no effect.

Note [One default per key]
    Every key has a single default, DeepSpeed 0.19.8's where DeepSpeed has the key. A default never
    depends on keys of other settings, because a file would then change its meaning when an
    unrelated key is added. Where a docstring says "If omitted, ...", the value is derived from keys
    of the same setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, PrivateAttr, Tag

from plait.config.schema.optimization import OptimizerSpec, SchedulerSpec
from plait.config.schema.sections import (
    CometSection,
    CsvMonitorSection,
    DataSection,
    ExpertsSection,
    FaultsSection,
    ModelSection,
    RunSection,
    TensorboardSection,
    WandbSection,
)
from plait.config.values import MAX_INT, MAX_PROCESSES, Flag, LocalPath
from plait.names import listed_names
from plait.parallel.activations.selective import DEFAULT_KEEP
from plait.parallel.technique import Technique
from plait.policy import Policy
from plait.sizes import SHORT_NAMES

_SHOWN_KEYS = 4
"""Number of ignored keys that a warning names."""


class Status(StrEnum):
    """Result of looking up a key of a configuration file."""

    SUPPORTED = "supported"
    RENAMED = "renamed"
    IGNORED = "ignored"
    REFUSED = "refused"
    COMMENT = "comment"


@dataclass(frozen=True)
class KeyReport:
    """Key of a file, its value, and its meaning in Plait."""

    key: str
    """Dotted path as written in the file."""
    value: Any
    status: Status
    meaning: str
    path: str = ""
    """Dotted path under the name of the schema or of the table of DeepSpeed's keys."""


@dataclass(frozen=True)
class Provenance:
    """Origin of a configuration: its file, and the keys as they were written."""

    name: str = "the configuration"
    """Path of the file, or a phrase for a configuration that was not read from a file."""
    rows: tuple[KeyReport, ...] = ()
    """All keys, in the order of the file."""
    origins: dict[str, str] | None = None
    """Origin of each field that was set, by path: "file", "override", "file: OTHER_NAME". None for
    a Config built in Python.
    """

    def warning(self) -> str | None:
        """Return a warning about the ignored keys, or None if there are none."""
        ignored = [row.key for row in self.rows if row.status is Status.IGNORED]
        if not ignored:
            return None
        names = listed_names(ignored, _SHOWN_KEYS)
        return f"{self.name}: ignored are {names}; `plait config explain` has the reasons"


PLAIT_SECTIONS = ("model", "data", "run", "parallel", "experts", "faults")
"""Sections that only Plait has. A file without any of them is also a valid DeepSpeed file."""


def _parse_number(value: Any) -> Any:
    """Convert a quoted number or an integral float (`5e8`) to a number; reject booleans."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false; write the number")
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            # pydantic reports the original text.
            return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _parse_dtype(value: Any) -> Any:
    """Convert a dtype's name to its short form: `bfloat16` becomes `bf16`."""
    if not isinstance(value, str):
        return value
    short_names = {name: short for short, name in SHORT_NAMES.items()}
    return short_names.get(value.lower(), value.lower())


def _parse_degree(value: Any) -> Any:
    """Convert -1, DeepSpeed's form of a derived degree, to "auto"."""
    if value == -1 and not isinstance(value, bool):
        return "auto"
    return value


def _auto_tag(value: Any) -> str:
    return "auto" if value == "auto" else "value"


def _compression_tag(value: Any) -> str:
    return "several" if isinstance(value, list) else "one"


# Discriminated unions instead of plain ones: pydantic then reports only the rule of the number,
# and not also that the value is not "auto".
Auto = Annotated[Literal["auto"], Tag("auto")]
Number = BeforeValidator(_parse_number)

Count = Annotated[int, Field(ge=1, le=MAX_INT), Number]
Degree = Annotated[int, Field(ge=1, le=MAX_PROCESSES), Number]
CountOrAuto = Annotated[Annotated[Count, Tag("value")] | Auto, Discriminator(_auto_tag)]
PowerOrAuto = Annotated[
    Annotated[int, Field(ge=0, le=126), Number, Tag("value")] | Auto, Discriminator(_auto_tag)
]
SizeOrAuto = Annotated[
    Annotated[float, Field(ge=0, allow_inf_nan=False), Number, Tag("value")] | Auto,
    Discriminator(_auto_tag),
]
PositiveOrAuto = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=False), Number, Tag("value")] | Auto,
    Discriminator(_auto_tag),
]
Compressions = Annotated[
    Annotated[Literal["none", "auto", "int8", "int4", "powersgd"], Tag("one")]
    | Annotated[
        Annotated[list[Literal["int8", "int4", "powersgd"]], Field(min_length=1)], Tag("several")
    ],
    Discriminator(_compression_tag),
]
FlagOrAuto = Annotated[Annotated[Flag, Tag("value")] | Auto, Discriminator(_auto_tag)]
FreeDegree = Annotated[
    Annotated[Degree, Tag("value")] | Auto, Discriminator(_auto_tag), BeforeValidator(_parse_degree)
]
DtypeName = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_parse_dtype)]


class Fp16Section(Policy):
    """Computation in float16 with loss scaling.

    The parameters that the optimizer updates keep their own dtype.
    """

    enabled: FlagOrAuto = False
    """Compute in float16. "auto": off, unless the caller (a Transformers TrainingArguments) says
    otherwise. The gradients of a step decide the loss scale of the next one, so on a GPU the
    program waits for the device once per step.
    """
    loss_scale: SizeOrAuto = 0.0
    """Constant loss scale; 0 adapts the scale to the gradients."""
    initial_scale_power: PowerOrAuto = 16
    """Exponent of the initial loss scale, which is 2 to this power."""
    loss_scale_window: CountOrAuto = 1000
    """Number of steps without overflow after which the scale doubles."""
    hysteresis: CountOrAuto = 2
    """Overflow at which the scale is first halved: 1 halves it at the first overflow, 2
    tolerates one.
    """
    consecutive_hysteresis: FlagOrAuto = False
    """Reset the hysteresis after every step without overflow, so that only consecutive overflows
    count.
    """
    min_loss_scale: PositiveOrAuto = 1.0
    """Minimum of the loss scale. An overflow at this scale ends the run."""


class Bf16Section(Policy):
    """Computation in bfloat16.

    The parameters that the optimizer updates keep their own dtype.
    """

    enabled: FlagOrAuto = False
    """Compute in bfloat16. "auto": off, unless the caller (a Transformers TrainingArguments) says
    otherwise.
    """
    check_grad_overflow: FlagOrAuto = True
    """Skip optimizer steps whose gradients are not finite. The program then reads the gradient norm
    before the update, so on a GPU it waits for the device once per step. false avoids this wait,
    for runs that non-finite gradients may end.
    """


class DataTypesSection(Policy):
    """Dtype of accumulated gradients, and modules that compute in float32."""

    grad_accum_dtype: DtypeName | None = None
    """Dtype in which the gradients of a step's micro-batches are accumulated. "fp32" also reduces
    them in float32, unless communication_data_type says otherwise. "fp16" and "bf16" change
    nothing: gradient shards are always accumulated in float32.
    """
    keep_in_fp32_modules: list[str] | Literal["auto"] = "auto"
    """Modules that compute in float32 under fp16 and bf16: names as in named_modules(), or their
    last components, with the wildcards * and ?. BatchNorm layers and the modules that a
    Transformers model lists always compute in float32; "auto" adds no others.
    """


class OffloadOptimizerSection(Policy):
    """Storage of optimizer states, gradients and master weights."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Storage tier of optimizer states, gradients and master weights. none: the device. cpu: host
    memory, where the optimizer then runs; for GPUs. nvme: files in `nvme_path`, read and written in
    chunks during the step; not for GPUs in this release.
    """
    pin_memory: Flag = True
    """cpu: pin the host memory, so that copies overlap with computation."""
    nvme_path: LocalPath | None = None
    """nvme: folder on a fast local disk."""
    buffer_count: Annotated[int, Field(ge=4, le=MAX_INT), Number] = 4
    """nvme: number of chunks in memory at the same time. One is computed while others are read and
    written.
    """
    buffer_size: Count = 100_000_000
    """nvme: float32 elements per chunk, which holds parameters, gradients and states."""
    ratio: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), Number] = 1.0
    """Share of the parameters that is offloaded: blocks starting with the first, then the
    parameters outside the blocks, until the share is reached. Master weights, gradients and
    states of all other parameters stay on the device.
    """


class OffloadParamSection(Policy):
    """Storage of the parameter shards of stage 3, from which blocks are gathered.

    These shards are also the master weights: there is no other copy. At stages 1 and 2 the master
    weights are stored with the states of offload_optimizer.
    """

    device: Literal["none", "cpu", "nvme"] = "none"
    """Storage tier of the parameter shards. none: the device. cpu: host memory; requires
    offload_optimizer.device = "cpu". nvme: files in `nvme_path`, prefetched for the block that is
    gathered next and evicted after use; not for GPUs in this release.
    """
    nvme_path: LocalPath | None = None
    """nvme: folder on a fast local disk."""
    buffer_count: Annotated[int, Field(ge=2, le=MAX_INT), Number] = 5
    """nvme: number of buffers in memory. Together they hold the shards of the block that is
    gathered and of the blocks that are prefetched.
    """
    buffer_size: Count = 100_000_000
    """nvme: float32 elements per buffer."""


class ZeroSection(Policy):
    """ZeRO: the training state that data-parallel processes shard instead of replicating it."""

    stage: Annotated[Literal[0, 1, 2, 3], Number] = 0
    """ZeRO stage, which is the training state that is sharded: 0 nothing, 1 optimizer states, 2
    also gradients, 3 also parameters, which are gathered for use and freed.
    """
    offload_optimizer: OffloadOptimizerSection = OffloadOptimizerSection()
    """Offload of optimizer states to host memory or to files."""
    offload_param: OffloadParamSection = OffloadParamSection()
    """Offload of parameters to host memory or to files."""
    reduce_bucket_size: CountOrAuto | None = None
    """Elements per gradient bucket. Buckets exist only at stage 0 in the model's own dtype. "auto":
    the square of the hidden size. If omitted, parallel.bucket_mib decides.
    """


class CompileSection(Policy):
    """torch.compile, applied to one block of the model at a time."""

    enabled: FlagOrAuto = False
    """Compile the blocks of the model. The first step takes longer."""
    backend: str = "inductor"
    """Backend of torch.compile."""
    mode: str | None = None
    """Mode of torch.compile, for example "max-autotune"."""


class PipelineSection(Policy):
    """Pipeline schedule and stages.

    The micro-batches of the pipeline are the accumulation steps.
    """

    schedule: str | None = None
    """Pipeline schedule: gpipe, 1f1b, interleaved-1f1b, looped-bfs, interleaved-zero-bubble, zbv or
    dualpipev. `plait schedule` draws them. If omitted, 1f1b, or interleaved-1f1b if stages_per_rank
    is above 1.
    """
    stages_per_rank: Count | None = None
    """Pipeline stages per rank. If omitted, the number that the schedule requires."""
    blocks_per_stage: tuple[Count, ...] | None = None
    """Blocks of each stage. If omitted, stages are balanced by their predicted time, including
    embedding and head.
    """


class CheckpointingSection(Policy):
    """Storage of the inputs of recomputed blocks, under DeepSpeed's names.

    parallel.recompute selects the blocks that are recomputed.
    """

    partition_activations: Flag = False
    """tp: each process keeps its slice of a recomputed block's input, and gathers the full
    input in backward.
    """
    cpu_checkpointing: Flag = False
    """Keep the inputs of recomputed blocks in host memory, as parallel.activation_offload with
    fraction 1 does.
    """


class RecomputeSection(Policy):
    """Activation checkpointing: forward keeps fewer activations, backward recomputes the others."""

    mode: Literal["none", "full", "selective", "budget"] | None = None
    """Mode of activation checkpointing. none: off. full: a block keeps only its input. selective: a
    block also keeps the results of the operators in `keep`. budget: the mode of every block is
    selected so that activations fit in `budget_gib`. If omitted, budget if `budget_gib` is given,
    else none.
    """
    every: Count = 1
    """full and selective: recompute every n-th block, starting with the first."""
    keep: tuple[str, ...] = DEFAULT_KEEP
    """selective and budget: operators whose results are kept: `attention`, `matmul` (products with
    weights), `every_second_matmul`, or operators like `aten.mm`.
    """
    budget_gib: Annotated[float, Field(gt=0, allow_inf_nan=False), Number] | None = None
    """Largest memory of activations per process, in GiB: the activations that blocks, head and loss
    keep, and those of the block that is being recomputed. The budget covers one micro-batch. In a
    pipeline it covers all micro-batches in flight on a rank, and every rank selects its own modes.
    """
    sequence_length: Count | None = None
    """budget: tokens per sequence. If omitted, data.sequence_length."""


class ActivationOffloadSection(Policy):
    """Offload of the tensors that blocks save for backward, out of device memory."""

    fraction: Annotated[float, Field(ge=0, le=1), Number] = 0.0
    """Share of the blocks whose activations are offloaded, starting with the first block: its
    backward comes last, so there is most time for both transfers.
    """
    device: Literal["cpu", "disk"] = "cpu"
    """Storage tier of offloaded activations. cpu: pinned host memory, for GPUs. disk: files in
    `path`.
    """
    path: LocalPath | None = None
    """disk: folder on a fast local disk."""


class ParallelSection(Policy):
    """Degrees and options of parallelism.

    The product of the degrees pp, dp_replicate, dp_shard, cp and tp is the number of processes.
    """

    pp: Degree = 1
    """Degree of pipeline parallelism: processes that hold consecutive blocks of the model."""
    pipeline: PipelineSection = PipelineSection()
    """pp: schedule and stages of the pipeline."""
    dp_replicate: FreeDegree | None = None
    """Number of replicas of the sharded model. If omitted, -1 or "auto", the remaining processes;
    at stage 0 all data-parallel processes.
    """
    dp_shard: FreeDegree | None = None
    """Number of processes over which ZeRO stages 1 to 3 shard. If omitted, -1 or "auto", the
    remaining processes.
    """
    cp: Degree = 1
    """Degree of context parallelism: processes that hold a part of every sequence."""
    context: Literal["all-gather-kv", "ulysses", "ring"] = "all-gather-kv"
    """cp: exchange of keys and values in attention. all-gather-kv: keys and values of all
    parts are gathered. ring: they are passed from process to process, so that only one other part
    is in memory. ulysses: processes exchange heads for tokens, which transfers least with many
    key-value heads; cp must divide the number of query heads.
    """
    ep: Degree = 1
    """Degree of expert parallelism: data-parallel processes that hold different experts of a
    mixture-of-experts model. Tokens are sent to the experts that they are routed to. The degree
    must divide dp_replicate x dp_shard and the number of experts. The processes have adjacent
    ranks.
    """
    tp: Degree = 1
    """Degree of tensor parallelism: processes that share every matrix product. They have adjacent
    ranks, which are connected by the fastest links.
    """
    sequence_parallel: Flag = False
    """tp: shard norms and the residual stream along the sequence."""
    tensor_overlap: Annotated[int, Field(ge=0, le=64), Number] = 0
    """tp: number of chunks of a row-parallel product; the all-reduce of one chunk overlaps
    with the product of the next. In backward, the all-reduce of input gradients overlaps with the
    computation of weight gradients. For slow links. 0: no overlap.
    """
    loss_parallel: Flag = True
    """tp: compute the loss on logits that stay split over the vocabulary, so that full logits
    are never allocated in training.
    """
    plan: dict[str, str] | None = None
    """tp: mapping from module pattern (`blocks.*.up`) to style (`colwise`, `rowwise`,
    `colwise_gather_output`, `rowwise_split_input`, `embedding_rowwise`, `vocab_head`,
    `replicated_with_grad_allreduce`). If omitted, the plan of the model family.
    """
    blocks: tuple[str, ...] = ()
    """Names or patterns (`model.layers.*`) of the repeated blocks. Each block is sharded and
    compiled on its own. If omitted, the longest list of equal modules in the model.
    """
    bucket_mib: PositiveOrAuto = "auto"
    """Size of a gradient bucket in MiB. Buckets exist only at stage 0 in the model's own dtype.
    "auto": the fastest size by the measured links, or 25 if none were measured.
    """
    loss_chunk_tokens: Annotated[int, Field(ge=0, le=MAX_INT), Number] = 0
    """Number of tokens for which head and cross entropy are computed at a time, so that full logits
    are never allocated. 0: all tokens at once. For language models with plait.causal_lm_loss.
    """
    mlp_tile_tokens: Annotated[int, Field(ge=0, le=MAX_INT), Number] = 0
    """Number of tokens for which the MLP of a block, and its experts, are computed at a time. They
    are recomputed in backward, so that their activations exist for one tile only. 0: all tokens at
    once. For MLPs that compute each token independently.
    """
    recompute: RecomputeSection = RecomputeSection()
    """Activation checkpointing."""
    activation_offload: ActivationOffloadSection = ActivationOffloadSection()
    """Offload of activations to host memory or to disk."""
    unused_parameters: FlagOrAuto = True
    """Allow a step to leave parameters unused, possibly different ones on each process."""
    transport: Literal["auto", "torch", "shared-memory"] = "auto"
    """Transport of gradients and parameters between data-parallel processes. "torch": torch's
    collectives (gloo, NCCL). "shared-memory": memory shared by the processes of one machine, for
    tensors on the CPU. "auto": shared memory if all processes of a group can use it.
    """
    all_reduce: Literal[
        "auto",
        "all-reduce",
        "reduce-scatter+all-gather",
        "hierarchical",
        "ring",
        "recursive-doubling",
    ] = "auto"
    """All-reduce algorithm of gradients at stage 0 in the model's own dtype. "auto": shared memory,
    or the fastest algorithm by the measured links. If none were measured, hierarchical (intra-node,
    inter-node, intra-node) if the processes span several machines with several processes each, else
    the all-reduce of the backend, which on GPUs selects its own ring or tree.
    """
    measure_seconds: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False), Number] = 1.0
    """Approximate time in which "auto" in all_reduce measures the links between the processes when
    the run starts, if they share no memory. 0: links are not measured, and the machines of the
    processes decide.
    """
    compress_gradients: Compressions = "none"
    """Compression of gradients between data-parallel processes: 8 or 4 bits per element with a
    scale every 256, or at stage 0 two low-rank factors per matrix. It changes the training
    slightly, and is for links that are slower than the computation. A list names candidates: the
    first steps are uncompressed, then each candidate runs for a few steps. A candidate that makes a
    step 5 % shorter is activated, a lossier one only if it saves another 5 %. "auto" is ["int8",
    "int4"].
    """
    compress_weights: Literal["none", "int8", "int4"] = "none"
    """Stages 1 to 3: compression of parameters when they are gathered."""
    error_feedback: FlagOrAuto = "auto"
    """compress_gradients: add the compression error of a step to the gradients of the next
    one. "auto": only at stage 0, where it takes as much memory as the gradients; at stages 1 to 3
    it would take the memory of unsharded gradients. PowerSGD always uses error feedback.
    """
    powersgd_rank: Count = 4
    """Rank of PowerSGD's factors."""
    optimizer_in_backward: Flag = False
    """Update every parameter as soon as its gradient is complete and free the gradient, so that
    only the gradients of one block exist at a time. It excludes accumulation, clipping, float16 and
    overflow checks, which need all gradients before the update.
    """
    secondary_partition: Annotated[int, Field(ge=0, le=MAX_PROCESSES), Number] = 0
    """Stage 3: number of adjacent processes (those of a machine) over which the parameters of a
    block stay sharded between its forward and its backward. The backward then gathers from these
    processes only. 0: off.
    """


class Config(Policy):
    """All settings of a configuration file."""

    train_batch_size: CountOrAuto | None = None
    """Samples per optimizer step over all processes: micro-batch size x accumulation steps x
    data-parallel processes. Two of the three batch keys determine the third.
    """
    train_micro_batch_size_per_gpu: CountOrAuto | None = None
    """Samples in one forward and backward pass of one data-parallel process."""
    gradient_accumulation_steps: CountOrAuto | None = None
    """Forward and backward passes per optimizer step."""
    gradient_clipping: SizeOrAuto = 1.0
    """Maximum of the global gradient norm; 0 does not clip. "auto": 1.0."""
    communication_data_type: DtypeName | None = None
    """Dtype of the gradient reduction. If omitted, the dtype of the computation, as in DeepSpeed.
    "fp32" sums bf16 and fp16 gradients without rounding, for twice the bytes.
    """
    data_parallel_size: Count | None = None
    """Expected number of data-parallel processes (dp_replicate x dp_shard). It only checks the
    layout.
    """
    num_layers: Count | None = None
    """Expected number of layers of the model, under Megatron-LM's name. It only checks the layout:
    every pipeline stage needs a layer.
    """
    zero_optimization: ZeroSection = ZeroSection()
    """Settings of ZeRO."""
    fp16: Fp16Section = Fp16Section()
    """Computation in float16."""
    bf16: Bf16Section = Bf16Section()
    """Computation in bfloat16."""
    data_types: DataTypesSection = DataTypesSection()
    """Dtype of accumulated gradients, and modules that compute in float32."""
    optimizer: OptimizerSpec | None = None
    """Optimizer. If omitted, AdamW with its defaults."""
    scheduler: SchedulerSpec | None = None
    """Learning rate schedule. If omitted, the learning rate is constant."""
    compile: CompileSection = CompileSection()
    """Settings of torch.compile."""
    activation_checkpointing: CheckpointingSection = CheckpointingSection()
    """Storage of the inputs of recomputed blocks."""
    parallel: ParallelSection = ParallelSection()
    """Degrees and options of parallelism."""
    experts: ExpertsSection = ExpertsSection()
    """Routers of mixture-of-experts models."""
    faults: FaultsSection = FaultsSection()
    """Handling of hangs and of non-finite numbers."""
    tensorboard: TensorboardSection = TensorboardSection()
    """Settings of the TensorBoard tracker."""
    wandb: WandbSection = WandbSection()
    """Settings of the Weights & Biases tracker."""
    comet: CometSection = CometSection()
    """Settings of the Comet tracker."""
    csv_monitor: CsvMonitorSection = CsvMonitorSection()
    """Settings of the tracker that writes CSV files."""
    model: ModelSection | None = None
    """Model that `plait train` builds."""
    data: DataSection | None = None
    """Training text that `plait train` reads."""
    run: RunSection | None = None
    """Length and output of a run of `plait train`."""

    _provenance: Provenance = PrivateAttr(default_factory=Provenance)
    _techniques: tuple[Technique, ...] = PrivateAttr(default=())

    @property
    def provenance(self) -> Provenance:
        """Origin of the values, and meaning of each key in the file."""
        return self._provenance

    def with_provenance(self, provenance: Provenance) -> Self:
        """Return a copy of this configuration with the given provenance."""
        copy = self.model_copy()
        copy._provenance = provenance
        return copy

    @property
    def techniques(self) -> tuple[Technique, ...]:
        """Techniques of the caller, in addition to those of the file."""
        return self._techniques

    def with_techniques(self, *techniques: Technique) -> Self:
        """Return a copy of this configuration with additional, user-defined techniques.

        See docs/how-to/add-a-technique.md.
        """
        copy = self.model_copy()
        copy._techniques = (*self._techniques, *techniques)
        return copy

    def value(self, path: str) -> Any:
        """Return the value of a field, or None if its section is omitted.

        Args:
            path: Dotted path of the field, such as `zero_optimization.stage`.
        """
        value: Any = self
        for name in path.split("."):
            value = getattr(value, name, None)
        return value

    def origin(self, path: str) -> str:
        """Return the origin of a field's value.

        Args:
            path: Dotted path of the field.

        Returns:
            For a configuration that was read: "file", "override", "file: NAME" for another name of
            the key, or "default". For one that was built in Python: "given" or "default".
        """
        names = path.split(".")
        origins = self._provenance.origins
        if origins is not None:
            # A parameter of the optimizer has no origin of its own, but `optimizer.params` has.
            while names and ".".join(names) not in origins:
                names.pop()
            return origins.get(".".join(names), "default")

        value: Any = self
        for name in names:
            if isinstance(value, Policy) and name in value.model_fields_set:
                value = getattr(value, name)
            elif isinstance(value, dict) and name in value:
                value = value[name]
            else:
                return "default"
        return "given"
