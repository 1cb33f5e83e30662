"""Steps of torch's optimizers over plain and sharded parameters in one group.

One fused or foreach call takes either plain tensors or shards of one device mesh. Which parameters are
plain follows the layout: with tensor parallelism, norms and the biases of row-split layers are. Groups of
their own would make the number of groups follow it as well, and a schedule's state, which has one rate
per group, could not be loaded on another layout. So groups are split for the duration of a step.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

Group = dict[str, Any]


def step_by_placement(optimizer: Optimizer) -> None:
    """Let every step of an optimizer of torch see one group per kind of parameter.

    Args:
        optimizer: Any optimizer. One that is not torch's is left as it is, since it may keep values
            of its own in its groups.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        _Splitter(optimizer)


class _Splitter:
    """Replaces an optimizer's groups before its step and puts them back after it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups: list[Group] | None = None
        """The optimizer's own groups, while it steps."""
        optimizer.register_step_pre_hook(self._split)
        optimizer.register_step_post_hook(self._restore)

    def _split(self, optimizer: Optimizer, *_: object) -> None:
        self._restore(optimizer)  # torch calls no hook after a step that raises
        groups = [part for group in optimizer.param_groups for part in _by_placement(group)]
        if len(groups) > len(optimizer.param_groups):
            self._groups, optimizer.param_groups = optimizer.param_groups, groups

    def _restore(self, optimizer: Optimizer, *_: object) -> None:
        if self._groups is not None:
            optimizer.param_groups, self._groups = self._groups, None


def _by_placement(group: Group) -> list[Group]:
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        kind = parameter.device_mesh if isinstance(parameter, DTensor) else None
        kinds.setdefault(kind, []).append(parameter)
    return [group] if len(kinds) <= 1 else [{**group, "params": members} for members in kinds.values()]
