"""What is priced: a model, a device, how a framework computes, and candidate layouts as arrays with
one entry each.

Everything broadcasts: one model with half a million layouts (a search), or a thousand rows of
different models and machines (an evaluation).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.planner.architecture import Architecture
from plait.planner.counted import Counted
from plait.planner.frameworks import Framework
from plait.planner.hardware import PRECISIONS, Device, Numbers, mapped

SCHEDULES = ("none", "gpipe", "1f1b", "interleaved", "zb-h1", "interleaved-zb", "zbv", "dualpipev")
"""`none` is a single stage."""
CONTEXT = ("all-gather-kv", "ring", "ulysses")
"""How attention sees other parts of a sequence, by the names of `parallel.context`."""
RECOMPUTE = ("none", "selective", "full", "operators", "budget")
"""`selective` computes the attention's core again, `full` the full block, `operators` all but
attention and every second product, and with `budget` some blocks do the one and others the other.
"""

NORM_LAST = ("olmo2", "olmo3", "glm4", "gemma2", "gemma3_text", "exaone4")
"""Families whose blocks normalise what their MLP returns."""


@dataclass(frozen=True)
class Layouts:
    """Candidates. Arrays of one length, or scalars."""

    pp: Numbers = 1
    schedule: Numbers = 0
    """Index into SCHEDULES."""
    vpp: Numbers = 1
    """Chunks of layers a stage."""
    tp: Numbers = 1
    sp: Numbers = 0
    cp: Numbers = 1
    context: Numbers = 0
    """Index into CONTEXT, with cp."""
    ep: Numbers = 1
    dp_replicate: Numbers = 1
    dp_shard: Numbers = 1
    stage: Numbers = 0
    """ZeRO stage."""
    recompute: Numbers = 0
    """Index into RECOMPUTE."""
    every: Numbers = 1
    """Of a stage's blocks every n-th recomputes, the first included. Of a published run the inverse
    of the share of blocks that do.
    """
    kept_operators: Numbers = 0.0
    """With `budget`: share of the blocks that keep the results of operators; the others recompute
    in full.
    """
    offload: Numbers = 0
    """Share of the parameters whose optimizer states and step are on the host."""
    offload_activations: Numbers = 0.0
    """Share of the activations that are kept on the host."""
    loss_chunk: Numbers = 0
    """Tokens of which head and loss are computed at a time; 0: of all."""
    micro_batch: Numbers = 1
    accumulation: Numbers = 1
    """Micro-batches of a step on one data-parallel rank."""

    @property
    def dp(self) -> Numbers:
        """Data-parallel ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> Numbers:
        """Devices."""
        return self.pp * self.tp * self.cp * self.dp

    def take(self, index: Any) -> Layouts:
        """Some of the candidates."""
        length = max(np.size(getattr(self, f.name)) for f in fields(self))
        return Layouts(
            **{
                f.name: np.broadcast_to(np.asarray(getattr(self, f.name)), (length,))[index]
                for f in fields(self)
            }
        )

    def at(self, index: int) -> dict[str, Any]:
        """One candidate as plain numbers."""
        found = {}
        for field_ in fields(self):
            value = np.asarray(getattr(self, field_.name))
            found[field_.name] = value.item() if value.size == 1 else value[index].item()
        return found

    @classmethod
    def of(cls, layouts: Sequence[Mapping[str, Any]]) -> Layouts:
        """From candidates as plain numbers; what one leaves out has its default."""
        return cls(
            **{
                f.name: np.array([layout.get(f.name, f.default) for layout in layouts])
                for f in fields(cls)
            }
        )


@dataclass(frozen=True)
class Job:
    """A model on a device by a framework, in candidate layouts."""

    model: Architecture
    device: Device
    framework: Framework
    layouts: Layouts
    sequence: Numbers
    precision: Numbers
    """Index into PRECISIONS: of the layers' matrix products."""
    own: bool = False
    """Plait's own blocks, whose bytes are counted and not guessed."""
    whole_attention: bool = False
    """Tensor parallelism splits the projections and leaves attention itself replicated on every
    rank, as with fused queries, keys and values.
    """
    counted: Counted | None = None
    """What the blocks keep, where they have been run without data; for a family that no formula
    knows.
    """

    @property
    def is_plait(self) -> NDArray[np.bool_]:
        """Whether Plait runs it, by its own rules of groups and messages; with compiled blocks and
        with experts too.
        """
        return np.asarray(self.framework.name) == "plait"

    @cached_property
    def needs_last(self) -> NDArray[np.bool_]:
        """Whether a backward needs the result of a block's last product: a norm comes after it, or
        a dropout, whose mask is made anew.
        """
        return np.isin(np.asarray(self.model.model_type), NORM_LAST) | (
            np.asarray(self.model.dropout) > 0
        )

    @property
    def stops_early(self) -> Numbers:
        """1 where recomputation ends at a block's last product."""
        return self.framework.stops_early * ~self.needs_last

    @property
    def attention_in_parts(self) -> NDArray[np.bool_]:
        """Whether torch computes attention product by product, with scores in memory, where it has
        no kernel for it: on CPU cores with a dropout, or with values of another width than keys.
        """
        other = (np.asarray(self.model.attention_dropout) > 0) | (
            np.asarray(self.model.value_width) != np.asarray(self.model.head_dim)
        )
        return np.asarray(self.device.on_cpu) & other & self.is_plait

    @property
    def tokens(self) -> Numbers:
        """Tokens of a micro-batch on one rank."""
        return self.layouts.micro_batch * self.sequence / self.layouts.cp

    @property
    def loss_tokens(self) -> Numbers:
        """Tokens of which the logits exist at a time on one rank."""
        chunk = np.asarray(self.layouts.loss_chunk)
        return np.where(chunk > 0, np.minimum(chunk, self.tokens), self.tokens)

    @property
    def element_bytes(self) -> Numbers:
        """Of an activation."""
        return np.where(np.asarray(self.precision) == PRECISIONS.index("fp32"), 4, 2)

    @property
    def linear_flops(self) -> Numbers:
        """Peak FLOP/s of the layers' products."""
        return (
            np.choose(self.precision, [self.device.flops.get(p, np.nan) for p in PRECISIONS])
            * self.device.power
        )

    @property
    def other_flops(self) -> Numbers:
        """Peak FLOP/s of attention and the head, which stay in 16 bits."""
        index = {name: position for position, name in enumerate(PRECISIONS)}
        sixteen = self.device.flops.get("bf16", np.nan)
        half = np.where(np.isnan(sixteen), self.device.flops.get("fp16", np.nan), sixteen)
        return (
            np.where(
                np.asarray(self.precision) == index["fp32"],
                self.device.flops.get("fp32", np.nan),
                half,
            )
            * self.device.power
        )

    def take(self, index: Any) -> Job:
        """Some of the candidates, where everything has one entry a candidate."""
        return self.mapped(lambda value: np.asarray(value)[index], self.layouts.take(index))

    def mapped(self, change: Callable[[Numbers], Numbers], layouts: Layouts) -> Job:
        """With every number changed, in other layouts."""
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
    """Share of the fullest stage's blocks that recompute."""
    every = job.layouts.every
    if not job.own:
        return 1 / every
    layers = stage_layers(job)[0]
    return np.ceil(layers / every) / layers


def stage_layers(job: Job) -> tuple[Numbers, Numbers, Numbers]:
    """(most layers of a stage, layers of the first stage, layers of the last stage).

    Layers are spread evenly, the first stages taking what remains. Where only layers + 2 divide
    into the chunks, embedding and head stand for a layer each, as Megatron-LM's
    `account_for_embedding_in_pipeline_split` does: the ends then have one layer less.
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
