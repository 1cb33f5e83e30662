"""Contract of a technique.

The engine applies the ordered list of techniques to modules (`apply` on `Parts`), and the planner
applies the same list to numbers (`account` on a `Ledger`). A technique never changes parameter
names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

from torch import nn

from plait.cluster.layout import Layout
from plait.cluster.mesh import Groups, Mesh
from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.hooks import StepHook
from plait.parallel.parts import Parts, Plans
from plait.policy import Policy

Kind = TypeVar("Kind", bound="Technique")


@dataclass(frozen=True)
class TechniqueContext:
    """Information that is available before a process group exists.

    This is the configuration and, if the model has been built, the model.
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
    plans: Plans = field(default_factory=Plans)
    """Results of the checks. Empty while the checks run."""

    def technique(self, kind: type[Kind]) -> Kind:
        """Return the configured technique of a class, or the default of the class."""
        for technique in self.techniques:
            if isinstance(technique, kind):
                return technique
        return kind()


class Technique(Policy):
    """Base class of the techniques of distributed training.

    Subclasses add fields for their settings, and override the methods below.
    """

    batch_axes: ClassVar[tuple[str, ...]] = ()
    """Axes whose ranks have different parts of the batch.

    Gradients and the weight of a loss are summed over them.
    """

    def check(self, context: TechniqueContext) -> Plans | None:
        """Check the settings before any process group exists.

        Without a model in the context, only the configuration is checked.

        Returns:
            The plans that `apply` or another technique needs, or None. They are added to
            `Parts.plans`.

        Raises:
            ConfigError: A setting is impossible. The message has the numbers and a remedy.
            ModelError: The model does not allow the settings.
        """
        return None

    def groups(self, context: TechniqueContext) -> Groups:
        """Return the process groups that this technique needs beyond those that every mesh has.

        All groups are created together with the mesh, after the checks.
        """
        return Groups()

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Change the model in place.

        Parameter names do not change. A pipeline rank keeps only the parameters of its stages.
        """
        raise NotImplementedError

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Return the hooks of a training step. Collective.

        Called once, when the model has its weights.
        """
        return []

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Add this technique's bytes and traffic to the ledger.

        The technique's fields may be arrays with one entry per candidate (see `sweep`).
        """
        raise NotImplementedError

    @classmethod
    def sweep(cls, **arrays: Any) -> Self:
        """Create a technique whose fields are arrays with one entry per candidate.

        It is for `account` only.
        """
        return cls.model_construct(**arrays)  # type: ignore[return-value]
