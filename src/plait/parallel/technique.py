"""The contract of a technique, and what passes through the ordered list of them.

The engine applies the list to modules (`apply` on Parts), the planner applies the same list to numbers (`account` on a Ledger). A technique
never changes parameter names. Settings that belong to one call of torch (precision and sharding both go to `fully_shard`) are kept in Parts
until the technique that makes the call consumes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch
from torch import nn

from plait.cluster.layout import Layout
from plait.cluster.mesh import Mesh
from plait.comm.waits import Waits
from plait.model.facts import ModelFacts
from plait.parallel.ledger import Ledger
from plait.policy import Policy

if TYPE_CHECKING:
    from plait.comm.compress import QuantisedReduceScatter
    from plait.comm.host import Host
    from plait.parallel.in_flight import BlockMode
    from plait.parallel.reducer import Reducer
    from plait.parallel.saved import Store
    from plait.parallel.styles import Region
    from plait.parallel.trial import Trial

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
class Parts:
    """A model that is transformed from one process to a layout."""

    model: nn.Module
    """Changed in place; the object a user holds stays the one that trains."""
    blocks: tuple[str, ...]
    """Names (FQNs) of the repeated blocks on this rank: the units of sharding, recompute and compilation."""
    notes: Mapping[type, object] = field(default_factory=dict)
    """What one technique has found or made for those after it (a plan, the tp region), by its type."""
    compute_dtype: torch.dtype | None = None
    """What parameters are cast to for forward and backward; None keeps their own dtype."""
    reduce_dtype: torch.dtype | None = None
    """What gradients are cast to for their reduction; None keeps the gradient's dtype."""
    tensor_region: Region | None = None
    """What the modules that are split over tp share; None without tensor parallelism."""
    loss_parallel: bool = False
    """Whether a loss that can may take logits that are split over the vocabulary."""
    block_modes: tuple[BlockMode, ...] = ()
    """What every block recomputes; empty before that is decided."""
    activation_store: Store | None = None
    """Where the first blocks put what they save for backward; None leaves it where it is."""
    offloaded_blocks: int = 0
    """How many blocks do."""
    masters_on_host: bool = False
    """Whether shards of parameters and gradients, and with them the optimizer's states, live in host memory."""
    offloaded_units: frozenset[str] = frozenset()
    """Blocks, and "" for what is outside of them, whose master weights, gradients and states are not in the device's memory."""
    pin_masters: bool = False
    """Whether that memory is pinned, so that copies overlap with computation."""
    always_shard: bool = False
    """Whether parameters are sharded also where one process holds all of them, in their own dtype."""
    disk_tier: Any = None
    """The engine's files for master weights, gradients and optimizer states, where they are not in memory."""
    reducer: Reducer | None = None
    """The stage 0 gradient reducer, where one is needed."""
    stage: int = 0
    """ZeRO stage that was applied."""
    compressors: Mapping[str, QuantisedReduceScatter] = field(default_factory=dict)
    """Compressed collectives of sharded units that may keep errors, by name."""
    parameter_host: Host | None = None
    """Ranks over `dp_shard` that see the same memory and can hold parameters once there."""
    waits: Waits = field(default_factory=Waits)
    """Exposed communication time of this rank."""
    trial: Trial | None = None
    """The steps that decide whether gradients are compressed, where that is open."""
    communication: str = ""
    """A description of how data-parallel ranks exchange gradients and parameters, with the reason."""

    def with_(self, **changes: Any) -> Parts:
        """A copy with some fields replaced."""
        return replace(self, **changes)

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

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Do it to the numbers. Fields may be arrays of candidates (see `sweep`)."""
        raise NotImplementedError

    @classmethod
    def sweep(cls, **arrays: Any) -> Self:
        """A technique whose fields are arrays, one entry a candidate layout; only for `account`."""
        return cls.model_construct(**arrays)  # type: ignore[return-value]
