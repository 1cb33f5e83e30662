"""The contract of a technique, and what passes through the ordered list of them.

The engine applies the list to modules (`apply` on Parts), the planner applies the same list to numbers (`account` on a Ledger). A technique
never changes parameter names. Settings that belong to one call of torch (precision and sharding both go to `fully_shard`) are kept in Parts
until the technique that makes the call consumes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar, cast

import torch
from torch import nn

from plait.cluster.layout import Layout
from plait.cluster.mesh import Mesh
from plait.model.facts import ModelFacts
from plait.parallel.hooks import Hooks, StepHook
from plait.parallel.ledger import Ledger
from plait.policy import Policy

T = TypeVar("T")
Kind = TypeVar("Kind", bound="Technique")


@dataclass(frozen=True)
class Context:
    """What is known before a process group exists: what is asked for and, once it is built, the model."""

    layout: Layout
    """The degrees."""
    techniques: tuple[Technique, ...] = ()
    """All that are chosen, in order."""
    accumulation: int = 1
    """Micro-batches of a step."""
    device_type: str = "cpu"
    """Of the devices that the processes will have."""
    model: nn.Module | None = None
    """Unsharded; None where only the configuration is known."""
    blocks: tuple[str, ...] = ()
    """Names (FQNs) of its repeated blocks."""

    def chosen(self, kind: type[Kind]) -> Kind:
        """The technique of a kind; as it is by default where none is chosen."""
        return next((technique for technique in self.techniques if isinstance(technique, kind)), None) or kind()


def notes_of(found: Iterable[object | None]) -> dict[type, object]:
    """What checks returned, by its type."""
    return {type(note): note for note in found if note is not None}


@dataclass(frozen=True)
class ShardSettings:
    """What the one call that shards a model is told, and what its gradients are."""

    compute_dtype: torch.dtype | None = None
    """What parameters are cast to for forward and backward; None keeps their own dtype."""
    reduce_dtype: torch.dtype | None = None
    """What gradients are cast to for their reduction; None keeps the gradient's dtype."""
    masters_on_host: bool = False
    """Whether shards of parameters and gradients, and with them the optimizer's states, live in host memory."""
    pin_masters: bool = False
    """Whether that memory is pinned, so that copies overlap with computation."""
    offloaded_units: frozenset[str] = frozenset()
    """Blocks, and "" for what is outside of them, whose master weights, gradients and states are not in the device's memory."""
    always_shard: bool = False
    """Whether parameters are sharded also where one process holds all of them, in their own dtype."""
    mean: bool = False
    """Whether reduced gradients are means, complete when the backward ends: for your own training loop, as under DistributedDataParallel.
    Otherwise sums: whoever runs the step has divided every loss before."""


@dataclass(frozen=True)
class Parts:
    """A model that is transformed from one process to a layout."""

    model: nn.Module
    """Changed in place; the object a user holds stays the one that trains."""
    blocks: tuple[str, ...]
    """Names (FQNs) of the repeated blocks on this rank: the units of sharding, recompute and compilation."""
    shard: ShardSettings = ShardSettings()
    """Left by those before the technique that shards."""
    hooks: Hooks = field(default_factory=Hooks)
    """What acts on a step, once everything is attached."""
    notes: Mapping[type, object] = field(default_factory=dict)
    """What one technique has found or made for those after it (a plan, the tp region), by its type."""

    def with_(self, **changes: Any) -> Parts:
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def with_shard(self, **changes: Any) -> Parts:
        """A copy with some settings of the shards replaced."""
        return replace(self, shard=replace(self.shard, **changes))

    def noted(self, kind: type[T]) -> T | None:
        """The note of a type, if there is one."""
        return cast("T | None", self.notes.get(kind))

    def with_note(self, note: object) -> Parts:
        """A copy with a note, in place of one of the same type."""
        return replace(self, notes={**self.notes, type(note): note})


class Technique(Policy):
    """One way to use many devices. Subclasses add fields and the methods below; all that a technique decides, it decides in them."""

    def check(self, context: Context) -> object | None:
        """Raise ConfigError or ModelError, with the numbers and a remedy, for what cannot be. Before any process group exists; where the
        context has no model, by the configuration alone. Returns what `apply` needs of what was found out about the model (a plan), which
        goes into the notes of `Parts`."""
        return None

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Do it to the model, in place. Parameter names stay as they are; a pipeline's rank keeps its own parameters only."""
        raise NotImplementedError

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """What acts on a training step, once the model has its weights. Collective."""
        return []

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Do it to the numbers. Fields may be arrays of candidates (see `sweep`)."""
        raise NotImplementedError

    @classmethod
    def sweep(cls, **arrays: Any) -> Self:
        """A technique whose fields are arrays, one entry a candidate layout; only for `account`."""
        return cls.model_construct(**arrays)  # type: ignore[return-value]
