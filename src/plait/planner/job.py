"""Input of the planner's formulas: a model, a device, a framework, and candidate layouts as arrays.

All numbers broadcast against each other. A job is one model with half a million layouts (a search),
or a thousand runs of different models and machines (an evaluation). See Note [Arrays of candidates]
in `plait.planner`.

A `Framework` describes training code by numbers: bytes of its states, fused kernels, overlap. The
search uses the framework that `plait` returns. The same formulas estimate published runs of other
frameworks (`benchmarks/planner_accuracy` has a table of frameworks). Rates are in
`plait.planner.constants`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.planner.architecture import Architecture
from plait.planner.built import CountedBytes
from plait.planner.hardware import PRECISIONS, DeviceSpec, Numbers, mapped

ATTENTION = ("flash", "fused", "plain")
"""Implementations of attention.

`flash` is one kernel. `fused` has softmax and mask in one kernel, and scores in memory. `plain` has
one kernel per operation, with all results in memory.
"""


@dataclass(frozen=True)
class Framework:
    """Properties of training frameworks: numbers, or arrays with one entry per candidate."""

    name: Any
    """Name, and suffix of the constant `stack.NAME`, the fitted speed of its kernels."""
    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    """Bytes per parameter of optimizer states. `weights` and `gradients` are also per parameter."""
    gathered: Numbers
    """Bytes per parameter of the copy that a forward uses, if weights have another dtype."""
    wire_gather: Numbers
    wire_reduce: Numbers
    """Bytes per parameter that a reduction of gradients sends. `wire_gather` is that of a gather of
    weights.
    """
    separate_norms: Numbers
    separate_rotary: Numbers
    separate_activation: Numbers
    """Share of activation functions that run as single operations of torch through memory.

    The other functions run as one kernel each. `separate_norms` and `separate_rotary` are the
    shares of RMS norms and rotary positions.
    """
    attention: Numbers
    """Index into ATTENTION."""
    hidden_tp: Numbers
    hidden_dp: Numbers
    """Share of data-parallel traffic that can overlap with computation. `hidden_tp` is that of
    tensor-parallel traffic.
    """
    host_seconds: Numbers
    """Host time to launch one layer's forward."""
    logits: Numbers
    """Bytes per logit while the loss is computed."""
    norms: Numbers
    """Saved bytes per hidden element of the norms and residuals of a layer, without dropout masks.
    """
    slack: Numbers
    """Share of memory that the allocator reserves and does not use."""
    step_bytes: Numbers
    """Bytes per parameter that the optimizer step moves."""
    accumulate_bytes: Numbers = 0
    """Bytes per parameter that the addition of a micro-batch's gradients moves.

    It is 0 if the kernel of the product adds them.
    """
    flash: Numbers = 1.0
    """Speed of the attention kernel relative to FlashAttention 2."""
    send_seconds: Numbers = 25e-6
    """Seconds that a send between stages takes in addition to the time on the link."""
    dynamic_scaling: Numbers = 0
    """1 if products in 8 and 4 bits find the largest element in a separate pass."""
    whole_logits: Numbers = 0
    """1 if tensor parallelism gathers the logits before the loss."""
    whole_inputs: Numbers = 0
    """Share of the products' inputs that stay gathered with sequence parallelism."""
    tp_launches: Numbers = 0.15
    """Additional launches with tensor parallelism, relative to those of a layer."""
    hook_seconds: Numbers = 0
    """Host time to gather and free one layer's weights at stage 3, if every module does so itself.
    """
    stops_early: Numbers = 0
    """1 if recomputation ends at the input of a block's last product.

    The backward needs nothing after this input. Compiled blocks and torch's non-reentrant
    checkpoint (since 2.1) stop there.
    """
    late_gradients: Numbers = 0
    """1 if a step's first backward allocates the gradients, as in torch's FSDP."""


@cache
def plait(*, precision: str = "bf16", pure: bool = False, compiled: bool = False) -> Framework:
    """Return the properties of Plait: modules of Transformers, FSDP2, no fused kernels.

    Args:
        precision: Name in `hardware.PRECISIONS`.
        pure: Whether weights and optimizer states have 16 bits.
        compiled: Whether blocks are compiled. This fuses kernels into fewer launches, as in
            torchtitan.
    """
    wide = precision == "fp32"
    width = 2 if pure else 4
    gathered = 2
    if pure or wide:
        # Weights are used in the dtype in which they are stored.
        gathered = 0

    return Framework(
        name="plait",
        weights=width,
        gradients=width,
        optimizer=2 * width,
        gathered=gathered,
        wire_gather=4 if wide else 2,
        wire_reduce=4,
        separate_norms=int(not compiled),
        separate_rotary=int(not compiled),
        separate_activation=int(not compiled),
        attention=ATTENTION.index("flash"),
        hidden_tp=0.0,
        hidden_dp=0.8,
        host_seconds=150e-6 if compiled else 500e-6,
        logits=14,
        norms=8 if compiled else 20,
        slack=0.08,
        step_bytes=36,
        accumulate_bytes=12 if wide else 10,
        whole_inputs=1,
        stops_early=1,
        late_gradients=1,
    )


SCHEDULES = ("none", "gpipe", "1f1b", "interleaved", "zb-h1", "interleaved-zb", "zbv", "dualpipev")
"""Pipeline schedules. `none` is a single stage."""
CONTEXT = ("all-gather-kv", "ring", "ulysses")
"""Algorithms of context parallelism, by the names of `parallel.context`."""
RECOMPUTE = ("none", "selective", "full", "operators", "budget")
"""Modes of recomputation.

`selective` recomputes the core of attention, `full` the whole block, `operators` everything except
attention and every second product. With `budget` some blocks use `operators` and the others `full`.
"""

NORM_LAST = ("olmo2", "olmo3", "glm4", "gemma2", "gemma3_text", "exaone4")
"""Families whose blocks normalize the output of their MLP."""


@dataclass(frozen=True)
class Layouts:
    """Candidate layouts: arrays of equal length, or scalars."""

    pp: Numbers = 1
    schedule: Numbers = 0
    """Index into SCHEDULES."""
    vpp: Numbers = 1
    """Chunks of layers per rank."""
    tp: Numbers = 1
    sp: Numbers = 0
    cp: Numbers = 1
    context: Numbers = 0
    """Index into CONTEXT. It only has an effect if cp is larger than 1."""
    ep: Numbers = 1
    dp_replicate: Numbers = 1
    dp_shard: Numbers = 1
    stage: Numbers = 0
    """ZeRO stage."""
    recompute: Numbers = 0
    """Index into RECOMPUTE."""
    every: Numbers = 1
    """Interval of recomputed blocks: every n-th block of a stage, starting with the first.

    For published runs it is the inverse of the share of recomputed blocks.
    """
    kept_operators: Numbers = 0.0
    """Share of the blocks that use `operators` with `budget`; the others use `full`."""
    offload: Numbers = 0
    """Share of the parameters whose optimizer states and step are on the host."""
    offload_activations: Numbers = 0.0
    """Share of the saved activations that are on the host."""
    loss_chunk: Numbers = 0
    """Tokens per chunk of head and loss; 0 for no chunks."""
    micro_batch: Numbers = 1
    accumulation: Numbers = 1
    """Micro-batches per step and data-parallel rank."""

    @property
    def dp(self) -> Numbers:
        """Number of data-parallel ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> Numbers:
        """Number of devices."""
        return self.pp * self.tp * self.cp * self.dp

    def take(self, index: Any) -> Layouts:
        """Return the candidates that an index, an array of indices, or a boolean mask selects."""
        columns = np.broadcast_arrays(*vars(self).values())
        return Layouts(*(np.atleast_1d(column)[index] for column in columns))

    def as_dict(self, index: int) -> dict[str, Any]:
        """Return one candidate as a dictionary of plain numbers."""
        values = {}
        for field_ in fields(self):
            value = np.asarray(getattr(self, field_.name))
            values[field_.name] = value.item() if value.size == 1 else value[index].item()
        return values

    @classmethod
    def of(cls, layouts: Sequence[Mapping[str, Any]]) -> Layouts:
        """Create candidates from plain numbers. Missing fields have their defaults."""
        columns = {}
        for f in fields(cls):
            columns[f.name] = np.array([layout.get(f.name, f.default) for layout in layouts])
        return cls(**columns)


@dataclass(frozen=True)
class Job:
    """Training job to estimate: a model, a device, a framework, and candidate layouts."""

    model: Architecture
    device: DeviceSpec
    framework: Framework
    layouts: Layouts
    sequence: Numbers
    precision: Numbers
    """Index into PRECISIONS of the layers' matrix products."""
    has_exact_blocks: bool = False
    """True for Plait's own blocks, whose saved bytes are known exactly (`block_bytes`)."""
    replicates_attention: bool = False
    """True if tensor parallelism computes attention on all ranks and splits only the projections.

    Models with fused queries, keys and values require this.
    """
    counted: CountedBytes | None = None
    """Saved bytes of the blocks if they were measured, for families without exact formulas."""

    @property
    def is_plait(self) -> NDArray[np.bool_]:
        """True if the framework is Plait.

        Unlike `has_exact_blocks`, this includes compiled blocks and models with experts.
        """
        return np.asarray(self.framework.name) == "plait"

    @cached_property
    def needs_last(self) -> NDArray[np.bool_]:
        """True if the backward needs the output of a block's last matrix multiplication.

        This is the case if a norm or a dropout follows. (The backward of a dropout needs its mask,
        which the recomputation draws after this multiplication.)
        """
        return np.isin(np.asarray(self.model.model_type), NORM_LAST) | (
            np.asarray(self.model.dropout) > 0
        )

    @property
    def stops_early(self) -> Numbers:
        """1 if recomputation stops before a block's last matrix multiplication, otherwise 0."""
        return self.framework.stops_early * ~self.needs_last

    @property
    def attention_in_parts(self) -> NDArray[np.bool_]:
        """True if attention runs without a fused kernel, with all attention scores in memory.

        torch's attention kernel for CPU cores supports neither dropout nor values whose width
        differs from that of the keys.
        """
        other = (np.asarray(self.model.attention_dropout) > 0) | (
            np.asarray(self.model.value_width) != np.asarray(self.model.head_dim)
        )
        return np.asarray(self.device.on_cpu) & other & self.is_plait

    @property
    def attention_tp(self) -> Numbers:
        """Number of tp ranks over which the attention heads are split."""
        return 1 if self.replicates_attention else self.layouts.tp

    @property
    def tokens(self) -> Numbers:
        """Number of tokens per micro-batch on a rank."""
        return self.layouts.micro_batch * self.sequence / self.layouts.cp

    @property
    def loss_tokens(self) -> Numbers:
        """Number of tokens whose logits exist at the same time on a rank."""
        chunk = np.asarray(self.layouts.loss_chunk)
        return np.where(chunk > 0, np.minimum(chunk, self.tokens), self.tokens)

    @property
    def element_bytes(self) -> Numbers:
        """Bytes per element of an activation."""
        return np.where(np.asarray(self.precision) == PRECISIONS.index("fp32"), 4, 2)

    @property
    def linear_flops(self) -> Numbers:
        """Peak FLOP/s of the layers' matrix multiplications."""
        return (
            np.choose(self.precision, [self.device.flops.get(p, np.nan) for p in PRECISIONS])
            * self.device.power
        )

    @property
    def other_flops(self) -> Numbers:
        """Peak FLOP/s of attention and the head, which use at least 16 bits."""
        sixteen = self.device.flops.get("bf16", np.nan)
        half = np.where(np.isnan(sixteen), self.device.flops.get("fp16", np.nan), sixteen)
        return (
            np.where(
                np.asarray(self.precision) == PRECISIONS.index("fp32"),
                self.device.flops.get("fp32", np.nan),
                half,
            )
            * self.device.power
        )

    def take(self, index: Any) -> Job:
        """Return the job for the candidates that an index, an index array or a mask selects.

        All numbers must have one entry per candidate.
        """
        return self.mapped(lambda value: np.asarray(value)[index], self.layouts.take(index))

    def mapped(self, change: Callable[[Numbers], Numbers], layouts: Layouts) -> Job:
        """Return a copy of the job with `change` applied to all numbers, and with new layouts."""
        return replace(
            self,
            model=mapped(self.model, change),
            device=mapped(self.device, change),
            framework=mapped(self.framework, change),
            layouts=layouts,
            sequence=change(self.sequence),
            precision=change(self.precision),
        )


def recompute_share(job: Job) -> Numbers:
    """Return the fraction of blocks that the stage with the most blocks recomputes."""
    every = job.layouts.every
    if not job.has_exact_blocks:
        return 1 / every
    layers = stage_layers(job)[0]
    return np.ceil(layers / every) / layers


def stage_layers(job: Job) -> tuple[Numbers, Numbers, Numbers]:
    """Return the layers of the pipeline stages, as (largest stage, first stage, last stage).

    Layers are distributed evenly; the first stages take the remainder. If layers + 2 is divisible
    by the number of stages but layers is not, the embedding and the head count as one layer each,
    as with Megatron-LM's `account_for_embedding_in_pipeline_split`. The first and the last stage
    then have one layer less.
    """
    layers = job.model.layers
    chunks = job.layouts.pp * job.layouts.vpp
    ends = (layers % chunks != 0) & ((layers + 2) % chunks == 0) & (job.layouts.pp > 1)
    per_chunk = np.where(ends, (layers + 2) // chunks, -(-layers // chunks))
    most = per_chunk * job.layouts.vpp
    end = np.where(ends, most - 1, most)
    even = layers % chunks == 0
    last = np.where(
        ends | even, end, np.maximum(layers - most * (job.layouts.pp - 1), layers // job.layouts.pp)
    )

    return (
        np.minimum(most, layers),
        np.minimum(end, layers),
        np.maximum(np.minimum(last, layers), 0),
    )
