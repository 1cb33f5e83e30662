"""All checks of a model and a configuration that need no process group, run once.

`plait train` runs them before it starts any process, `initialize` and `parallelize` before they
change the model. The results of the checks (the plan of tensor parallelism, the stages of a
pipeline) are kept, so that nothing is traced twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from plait.cluster import accelerator
from plait.cluster.mesh import Groups
from plait.config.resolving.resolve import Resolved
from plait.model.blocks import find_blocks
from plait.optim.optimizer import refuse_nothing_to_train
from plait.parallel.order import check_all, groups_of
from plait.parallel.parts import Parts, Plans
from plait.sharded.misuse import refuse_unfit_layers
from plait.sharded.replicas import refuse_without_replicas


@dataclass(frozen=True)
class CheckedModel:
    """A model that the techniques of a configuration can be applied to.

    Attributes:
        model: The unsharded model.
        resolved: The configuration.
        blocks: Names (FQNs) of the model's repeated blocks.
        plans: Results of the techniques' checks.
        groups: Process groups that the techniques need, besides one per axis.
    """

    model: nn.Module
    resolved: Resolved
    blocks: tuple[str, ...]
    plans: Plans
    groups: Groups

    @property
    def parts(self) -> Parts:
        """The model in the form that techniques are applied to."""
        return Parts(model=self.model, blocks=self.blocks, plans=self.plans)

    def with_resolved(self, resolved: Resolved) -> CheckedModel:
        """Return a copy with another configuration.

        It may differ only in settings that no check reads.
        """
        return replace(self, resolved=resolved)


def checked_model(model: nn.Module, resolved: Resolved) -> CheckedModel:
    """Check a model against a configuration. Changes nothing.

    Raises:
        ConfigError: A setting does not fit the model or the layout.
        ModelError: The model cannot be trained, or cannot be split as the configuration says.
    """
    refuse_nothing_to_train(model)
    refuse_without_replicas(resolved)
    blocks = find_blocks(model, resolved.blocks or None)
    refuse_unfit_layers(model, resolved)
    context = resolved.context(device_type=accelerator.available_type(), model=model, blocks=blocks)
    plans = check_all(context)
    return CheckedModel(model, resolved, blocks, plans, groups_of(replace(context, plans=plans)))
