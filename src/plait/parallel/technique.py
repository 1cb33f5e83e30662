"""The contract of a technique, and the data that passes through the ordered list of techniques.

The engine applies the list to modules (`apply` on Parts), the planner applies the same list to
numbers (`account` on a Ledger). A technique never changes parameter names. Settings that belong to
one call of torch (precision and sharding both go to `fully_shard`) are kept in Parts until the
technique that makes the call consumes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.cluster.layout import Layout
from plait.cluster.mesh import Groups, Mesh
from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.hooks import Hooks, StepHook
from plait.parallel.reduction import Reduction, sharded_axes
from plait.policy import Policy

T = TypeVar("T")
Kind = TypeVar("Kind", bound="Technique")


@dataclass(frozen=True)
class Context:
    """The settings and, once it is built, the model: everything that is known before a process
    group exists.
    """

    layout: Layout
    """The degrees."""
    techniques: tuple[Technique, ...] = ()
    """All selected techniques, in order."""
    accumulation: int = 1
    """Micro-batches of a step."""
    device_type: str = "cpu"
    """Device type of the processes."""
    model: nn.Module | None = None
    """Unsharded; None where only the configuration is known."""
    blocks: tuple[str, ...] = ()
    """Names (FQNs) of its repeated blocks."""
    notes: Mapping[type, object] = field(default_factory=dict)
    """What the checks found, by type; empty while they run."""

    def chosen(self, kind: type[Kind]) -> Kind:
        """The technique of a class; the default one where none is selected."""
        return (
            next((technique for technique in self.techniques if isinstance(technique, kind)), None)
            or kind()
        )


def notes_of(found: Iterable[object | None]) -> dict[type, object]:
    """What checks returned, by its type."""
    return {type(note): note for note in found if note is not None}


@dataclass(frozen=True)
class ShardSettings:
    """Settings of the one call that shards a model, and of its gradients."""

    compute_dtype: torch.dtype | None = None
    """What parameters are cast to for forward and backward; None keeps their own dtype."""
    reduce_dtype: torch.dtype | None = None
    """What gradients are cast to for their reduction; None keeps the gradient's dtype."""
    float32_modules: tuple[str, ...] = ()
    """Modules (FQNs) that compute in float32, whatever `compute_dtype` is."""
    master_weights_on_host: bool = False
    """Whether shards of parameters and gradients, and with them the optimizer's states, are stored
    in host memory.
    """
    pin_master_weights: bool = False
    """Whether that memory is pinned, so that copies overlap with computation."""
    offloaded_units: frozenset[str] = frozenset()
    """Blocks, and "" for what is outside of them, whose master weights, gradients and states are
    not in the device's memory.
    """
    own_mesh: Mapping[str, DeviceMesh] = field(default_factory=dict)
    """Modules (FQNs) whose parameters are not reduced with the others: they are sharded over a mesh
    of their own, and where nothing is sharded, another hook sums their gradients.
    """
    always_shard: bool = False
    """Whether parameters are sharded also where one process holds all of them, in their own dtype.
    """
    mean: bool = False
    """Whether reduced gradients are means, complete when the backward ends: for your own training
    loop, as under DistributedDataParallel. Otherwise sums: the engine has divided every loss
    before.
    """


@dataclass(frozen=True)
class Parts:
    """A model that is transformed from one process to a layout."""

    model: nn.Module
    """Changed in place; the object a user holds stays the one that trains."""
    blocks: tuple[str, ...]
    """Names (FQNs) of the repeated blocks on this rank: the units of sharding, recompute and
    compilation.
    """
    shard: ShardSettings = ShardSettings()
    """Set by the techniques before the one that shards."""
    batch_axes: tuple[str, ...] = ()
    """Axes whose ranks are given different parts of the batch, by all techniques
    (`Technique.batch_axes`).
    """
    hooks: Hooks = field(default_factory=Hooks)
    """The hooks of a step, once all are attached."""
    notes: Mapping[type, object] = field(default_factory=dict)
    """Results of one technique for later ones (a plan, the tp region), by type."""

    def with_(self, **changes: Any) -> Parts:
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def with_shard(self, **changes: Any) -> Parts:
        """A copy with some settings of the shards replaced."""
        return replace(self, shard=replace(self.shard, **changes))

    @property
    def apart(self) -> frozenset[nn.Parameter]:
        """The parameters of `ShardSettings.own_mesh`."""
        return frozenset(
            p for name in self.shard.own_mesh for p in self.model.get_submodule(name).parameters()
        )

    def reduction(self, parameter: nn.Parameter) -> Reduction:
        """Which ranks hold what of a parameter of this rank, and over which its gradient is
        summed.
        """
        sharded = sharded_axes(parameter)
        return Reduction(sharded, ("edp",) if "ep" in sharded else self.batch_axes)

    def noted(self, kind: type[T]) -> T | None:
        """The note of a type, if there is one."""
        return cast("T | None", self.notes.get(kind))

    def with_notes(self, *notes: object | None) -> Parts:
        """A copy with more notes, each in place of one of the same type; None is none."""
        return replace(self, notes={**self.notes, **notes_of(notes)})


class Technique(Policy):
    """A technique of distributed training. Subclasses add fields and override the methods below,
    which take all of its decisions.
    """

    batch_axes: ClassVar[tuple[str, ...]] = ()
    """Axes whose ranks it gives different parts of the batch: over these, gradients and the weight
    of a loss are sums.
    """

    def check(self, context: Context) -> object | None:
        """Raise ConfigError or ModelError, with the numbers and a remedy, for an impossible
        setting. Runs before any process group exists; where the context has no model, it checks the
        configuration alone. Returns a result about the model that `apply` needs (a plan), which is
        added to the notes of `Parts`.
        """
        return None

    def groups(self, context: Context) -> Groups:
        """The process groups that it needs besides those that every mesh has: all are made with the
        mesh, after the checks, and none later.
        """
        return Groups()

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Change the model in place. Parameter names do not change; a pipeline rank keeps only its
        own parameters.
        """
        raise NotImplementedError

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """The hooks of a training step. Called once the model has its weights. Collective."""
        return []

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Add this technique's bytes and traffic to the ledger. Fields may be arrays of candidates
        (see `sweep`).
        """
        raise NotImplementedError

    @classmethod
    def sweep(cls, **arrays: Any) -> Self:
        """A technique whose fields are arrays, one entry a candidate layout; only for `account`."""
        return cls.model_construct(**arrays)  # type: ignore[return-value]
