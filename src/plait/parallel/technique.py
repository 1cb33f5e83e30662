"""Contract of a technique, and the data that passes through the ordered list of techniques.

The engine applies the list to modules (`apply` on `Parts`), and the planner applies the same list
to numbers (`account` on a `Ledger`). A technique never changes parameter names.

Some settings of several techniques are arguments of one call of torch: precision, offload and
sharding all go to `fully_shard`. They are collected in `Parts.shard` until the technique that makes
the call consumes them.
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
class TechniqueContext:
    """Everything that is known before a process group exists.

    These are the settings and, once it is built, the model.
    """

    layout: Layout
    """Degrees of the axes."""
    techniques: tuple[Technique, ...] = ()
    """All techniques, in order."""
    accumulation: int = 1
    """Micro-batches per step."""
    device_type: str = "cpu"
    """Device type of the processes."""
    model: nn.Module | None = None
    """The unsharded model, or None if only the configuration is known."""
    blocks: tuple[str, ...] = ()
    """Names (FQNs) of the repeated blocks of the model."""
    notes: Mapping[type, object] = field(default_factory=dict)
    """Results of the checks, by type. Empty while the checks run."""

    def chosen(self, kind: type[Kind]) -> Kind:
        """Return the technique of a class, or its default if none was configured."""
        for technique in self.techniques:
            if isinstance(technique, kind):
                return technique
        return kind()


def notes_of(results: Iterable[object | None]) -> dict[type, object]:
    """Index the results of checks by their type, without None."""
    return {type(note): note for note in results if note is not None}


@dataclass(frozen=True)
class ShardSettings:
    """Settings of the call that shards a model, and of the reduction of its gradients."""

    compute_dtype: torch.dtype | None = None
    """Dtype of parameters in forward and backward, or None for their own dtype."""
    reduce_dtype: torch.dtype | None = None
    """Dtype of the gradient reduction, or None for the dtype of the gradients."""
    float32_modules: tuple[str, ...] = ()
    """Modules (FQNs) that compute in float32, whatever `compute_dtype` is."""
    master_weights_on_host: bool = False
    """True if host memory stores shards of parameters and gradients, and the optimizer states."""
    pin_master_weights: bool = False
    """True if that memory is pinned, so that copies overlap with computation."""
    offloaded_units: frozenset[str] = frozenset()
    """Units whose master weights, gradients and states are not in the device's memory.

    These are names of blocks, and "" for all parameters outside of the blocks.
    """
    separate_mesh: Mapping[str, DeviceMesh] = field(default_factory=dict)
    """Modules (FQNs) with a separate mesh, such as experts.

    Their parameters are not reduced with the others. They are sharded over this mesh, or another
    hook sums their gradients if nothing is sharded.
    """
    always_shard: bool = False
    """True if parameters are sharded even if one process holds all of them, in their own dtype."""
    mean: bool = False
    """True if reduced gradients are means, complete when the backward ends.

    This is for the user's own training loop, as under DistributedDataParallel. Otherwise they are
    sums, because the engine has already divided every loss.
    """


@dataclass(frozen=True)
class Parts:
    """A model while techniques transform it from one process to a layout."""

    model: nn.Module
    """The model, changed in place: the object that a user holds is the one that trains."""
    blocks: tuple[str, ...]
    """Names (FQNs) of the repeated blocks on this rank, the units of sharding and recompute."""
    shard: ShardSettings = ShardSettings()
    """Settings of earlier techniques for the one that shards."""
    batch_axes: tuple[str, ...] = ()
    """Axes whose ranks have different parts of the batch, those of all techniques."""
    hooks: Hooks = field(default_factory=Hooks)
    """Hooks of a step, once all techniques are attached."""
    notes: Mapping[type, object] = field(default_factory=dict)
    """Results of a technique for later ones (a plan, the tp region), by type."""

    def with_(self, **changes: Any) -> Parts:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)

    def with_shard(self, **changes: Any) -> Parts:
        """Return a copy with some settings of the shards replaced."""
        return replace(self, shard=replace(self.shard, **changes))

    @property
    def separately_reduced(self) -> frozenset[nn.Parameter]:
        """Parameters of `ShardSettings.separate_mesh`, whose gradients another hook reduces."""
        return frozenset(
            p
            for name in self.shard.separate_mesh
            for p in self.model.get_submodule(name).parameters()
        )

    def reduction(self, parameter: nn.Parameter) -> Reduction:
        """Return which axes split a parameter of this rank, and which ones sum its gradient."""
        sharded = sharded_axes(parameter)
        # The all-to-all of ep has already brought the tokens of all its ranks to an expert.
        return Reduction(sharded, ("edp",) if "ep" in sharded else self.batch_axes)

    def noted(self, kind: type[T]) -> T | None:
        """Return the note of a type, or None."""
        return cast("T | None", self.notes.get(kind))

    def with_notes(self, *notes: object | None) -> Parts:
        """Return a copy with more notes.

        A note replaces one of the same type, and None is ignored.
        """
        return replace(self, notes={**self.notes, **notes_of(notes)})


class Technique(Policy):
    """Base class of the techniques of distributed training.

    Subclasses add fields, and override the methods below, which take all of its decisions.
    """

    batch_axes: ClassVar[tuple[str, ...]] = ()
    """Axes whose ranks have different parts of the batch.

    Gradients and the weight of a loss are summed over them.
    """

    def check(self, context: TechniqueContext) -> object | None:
        """Check the settings before any process group exists.

        Returns:
            A result about the model that `apply` needs (a plan), or None. It is added to
            `Parts.notes`.

        Raises:
            ConfigError: A setting is impossible. The message has the numbers and a remedy. Without
                a model in the context, only the configuration is checked.
            ModelError: The model does not allow the settings.
        """
        return None

    def groups(self, context: TechniqueContext) -> Groups:
        """Return the process groups that it needs besides those of every mesh.

        All groups are created with the mesh, after the checks, and none later.
        """
        return Groups()

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Change the model in place.

        Parameter names do not change. A pipeline rank keeps only the parameters of its stages.
        """
        raise NotImplementedError

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Return the hooks of a training step. Collective.

        Called once the model has its weights.
        """
        return []

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Add this technique's bytes and traffic to the ledger.

        Fields may be arrays with one entry per candidate (see `sweep`).
        """
        raise NotImplementedError

    @classmethod
    def sweep(cls, **arrays: Any) -> Self:
        """Create a technique whose fields are arrays with one entry per candidate.

        It is for `account` only.
        """
        return cls.model_construct(**arrays)  # type: ignore[return-value]
