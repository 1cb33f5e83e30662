"""Data that is passed through the ordered list of techniques.

The checks return `Plans`, from the full model and before any process group exists. `Parts` is the
model while techniques transform it. What one technique passes to another is a named field of one of
these classes.

Some settings of several techniques are arguments of one call of torch: precision, offload,
compression and sharding all configure `fully_shard` and the reduction of gradients. They are
collected in `Parts.shard` until the technique that makes the call consumes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.comm.shared_memory.collectives import SharedMemoryGroup
from plait.model.experts import Experts
from plait.model.outer_layers import OuterUnits
from plait.model.plans import TensorPlan
from plait.parallel.accounting.activations import BlockMode
from plait.parallel.accounting.compression_scheme import Scheme
from plait.parallel.activations.activation_store import OffloadedActivations
from plait.parallel.context.attention_function import InstalledAttention
from plait.parallel.data.compression import CompressedUnits, CompressionAutotuner
from plait.parallel.data.reducer import Reducer
from plait.parallel.experts.adapted_parameters import AdaptedParameters
from plait.parallel.experts.router_statistics import RouterStatistics
from plait.parallel.hooks import Hooks, StepHook
from plait.parallel.mlps import TokenModules
from plait.parallel.parameter_layout import Reduction, sharded_axes
from plait.parallel.pipeline.stage import PipelinePlan
from plait.parallel.tensor.styles import Region


@dataclass(frozen=True)
class Plans:
    """Results of the techniques' checks, or None for techniques that are not used."""

    tensor: TensorPlan | None = None
    """Style of every module that tensor parallelism splits."""
    pipeline: PipelinePlan | None = None
    """Schedule of the pipeline, and the stages of the model."""
    tiled: TokenModules | None = None
    """Modules that are computed in tiles of tokens."""
    outer_units: OuterUnits | None = None
    """Sharding units outside the blocks. None if only the configuration is known."""

    def merge(self, other: Plans) -> Plans:
        """Return a copy with the plans of `other` added."""
        plans = {name: plan for name, plan in vars(other).items() if plan is not None}
        return replace(self, **plans)


@dataclass(frozen=True)
class ShardSettings:
    """Settings for sharding a model and reducing its gradients."""

    compute_dtype: torch.dtype | None = None
    """Dtype of parameters in forward and backward, or None for their own dtype."""
    reduce_dtype: torch.dtype | None = None
    """Dtype of the gradient reduction, or None for the dtype of the gradients."""
    float32_modules: tuple[str, ...] = ()
    """Modules (FQNs) that compute in float32, whatever `compute_dtype` is."""
    master_weights_on_host: bool = False
    """True if host memory stores shards of parameters and gradients, and the optimizer states."""
    pin_master_weights: bool = False
    """True if this host memory is pinned, so that copies overlap with computation."""
    offloaded_units: frozenset[str] = frozenset()
    """Units whose master weights, gradients and states are not in the device's memory.

    These are names of blocks, and "" for all parameters outside the blocks.
    """
    separate_mesh: Mapping[str, DeviceMesh] = field(default_factory=dict)
    """Separate meshes of some modules, such as experts, by the modules' FQNs.

    Their parameters are not reduced with the others. They are sharded over this mesh, or another
    hook sums their gradients if nothing is sharded.
    """
    always_shard: bool = False
    """True to use `fully_shard` even if one process holds all parameters and casts none."""
    compression: Scheme = field(default_factory=Scheme)
    """Compression of gradients and gathered parameters that is used from the first step."""
    compression_candidates: tuple[Scheme, ...] = ()
    """Schemes among which the first steps choose, the least lossy first."""
    mean: bool = False
    """True if reduced gradients are means, complete when the backward ends.

    This is for the user's own training loop, as under DistributedDataParallel. Otherwise they are
    sums, because the engine has already divided every loss.
    """


@dataclass(frozen=True)
class ShardCollectives:
    """Collectives that gather and reduce the shards of a model, and how they were selected."""

    description: str = ""
    """Description of the selection, with the reason."""
    compressors: CompressedUnits = field(default_factory=CompressedUnits)
    """Compressed reduce-scatters of the units. Empty without compression."""
    is_default: bool = False
    """True if no setting has decided the selection."""
    parameter_host: SharedMemoryGroup | None = None
    """Ranks of a machine that can store parameters once in shared memory, or None."""


@dataclass(frozen=True)
class Parts:
    """Model and state while techniques convert a single-process model to a layout.

    A field that a technique fills has its default value if the technique is not used.
    """

    model: nn.Module
    """The model, changed in place: the object that a user holds is the one that trains."""
    blocks: tuple[str, ...]
    """Names (FQNs) of the repeated blocks on this rank, the units of sharding and recompute."""
    plans: Plans = Plans()
    """Results of the checks."""
    batch_axes: tuple[str, ...] = ()
    """Axes of all techniques whose ranks have different parts of the batch."""
    region: Region | None = None
    """Tensor parallelism: its group, and the state of the modules that it splits."""
    attention: InstalledAttention | None = None
    """Context parallelism: the attention that replaces the model's."""
    router_statistics: RouterStatistics | None = None
    """Routing: statistics for the balance loss, where the model's own loss is not enough."""
    experts: tuple[Experts, ...] = ()
    """Expert parallelism: layers whose experts are on several ranks."""
    expert_adapters: AdaptedParameters | None = None
    """Adapters of the parameters of experts, or None if the model has none."""
    offloaded_activations: OffloadedActivations | None = None
    """Activation offload: the store, and the number of blocks that use it."""
    recompute_modes: tuple[BlockMode, ...] | None = None
    """Recompute: mode of each block of this rank."""
    shard: ShardSettings = ShardSettings()
    """Settings that earlier techniques leave for the technique that shards."""
    zero_stage: int = 0
    """Data parallelism: ZeRO stage."""
    tracks_unused: bool = True
    """Data parallelism: whether a step may leave parameters without a gradient."""
    reducer: Reducer | None = None
    """Data parallelism: reducer of the gradients of replicated parameters."""
    shard_collectives: ShardCollectives | None = None
    """Data parallelism: collectives of sharded parameters."""
    compression_autotuner: CompressionAutotuner | None = None
    """Data parallelism: hook that chooses among `shard.compression_candidates`."""
    hooks: Hooks = field(default_factory=Hooks)
    """Hooks of a step, once all techniques are attached."""

    @property
    def compressors(self) -> CompressedUnits:
        """Compressed reduce-scatters of sharded units. Empty without compression."""
        if self.shard_collectives is None:
            return CompressedUnits()
        return self.shard_collectives.compressors

    def with_shard(self, **changes: Any) -> Parts:
        """Return a copy with some settings of the shards replaced."""
        return replace(self, shard=replace(self.shard, **changes))

    def with_hooks(self, *hooks: StepHook) -> Parts:
        """Return a copy with more hooks after the existing ones."""
        return replace(self, hooks=Hooks((*self.hooks.all, *hooks)))

    @property
    def separately_reduced(self) -> frozenset[nn.Parameter]:
        """Parameters of `ShardSettings.separate_mesh`, whose gradients another hook reduces."""
        return frozenset(
            p
            for name in self.shard.separate_mesh
            for p in self.model.get_submodule(name).parameters()
        )

    def reduction(self, parameter: nn.Parameter) -> Reduction:
        """Return a parameter's `Reduction`: the axes that split it or sum its gradient."""
        sharded = sharded_axes(parameter)
        # The all-to-all of ep has already brought the tokens of all its ranks to an expert.
        return Reduction(sharded, ("edp",) if "ep" in sharded else self.batch_axes)
