"""All checks of a model and a configuration that need no process group, run once.

`plait train` asks before it starts any process, `initialize` and `parallelize` before they touch
the model. The intermediate results of checks (the plan of tensor parallelism, the cut of a
pipeline) are kept, so that nothing is traced twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from plait.cluster import accelerator
from plait.cluster.mesh import Groups
from plait.config.resolving.resolve import Resolved
from plait.model.blocks import find_blocks
from plait.optim.optimizer import refuse_nothing_to_train
from plait.parallel.order import check_all, groups_of
from plait.parallel.technique import Parts
from plait.sharded.misuse import refuse_unfit_layers
from plait.sharded.replicas import refuse_without_replicas


@dataclass(frozen=True)
class CheckedModel:
    """A model that the techniques of a configuration can be applied to."""

    model: nn.Module
    """Unsharded."""
    resolved: Resolved
    blocks: tuple[str, ...]
    """Names (FQNs) of its repeated blocks."""
    notes: Mapping[type, object]
    """What the checks found out, by type."""
    groups: Groups
    """What the techniques need besides a group for every axis."""

    @property
    def parts(self) -> Parts:
        """What the techniques are applied to."""
        return Parts(model=self.model, blocks=self.blocks, notes=self.notes)

    def with_resolved(self, resolved: Resolved) -> CheckedModel:
        """The same with settings that no check asks for changed."""
        return replace(self, resolved=resolved)


def checked_model(model: nn.Module, resolved: Resolved) -> CheckedModel:
    """Raise ConfigError or ModelError for what cannot be. Changes nothing."""
    refuse_nothing_to_train(model)
    refuse_without_replicas(resolved)
    blocks = find_blocks(model, resolved.blocks or None)
    refuse_unfit_layers(model, resolved)
    context = resolved.context(device_type=accelerator.available_type(), model=model, blocks=blocks)
    notes = check_all(context)
    return CheckedModel(model, resolved, blocks, notes, groups_of(replace(context, notes=notes)))
