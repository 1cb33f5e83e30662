"""Steps of torch's optimizers over plain and sharded parameters in one group.

A fused or foreach call accepts either plain tensors or shards of one device mesh. The layout
decides which parameters are plain: under tensor parallelism, for example, the norms and the biases
of row-split layers. If plain parameters had permanent groups, the number of groups would depend on
the layout too. An LR scheduler's state has one rate per group, so it could not be loaded on another
layout. Groups are therefore split for the duration of a step only.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

Group = dict[str, Any]


def step_by_placement(optimizer: Optimizer) -> None:
    """Split an optimizer's groups by the placement of their parameters during every step.

    Args:
        optimizer: Any optimizer. Only torch's are changed, because others may keep values of their
            own in their groups.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        _GroupSplitter(optimizer)


class _GroupSplitter:
    """Replaces an optimizer's groups before its step and puts them back after it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups: list[Group] | None = None
        """The optimizer's groups before the split. None outside of a step."""
        optimizer.register_step_pre_hook(self._split)
        optimizer.register_step_post_hook(self._restore)

    def _split(self, optimizer: Optimizer, *_: object) -> None:
        # torch calls no post hook after a step that raises.
        self._restore(optimizer)
        groups = [split for group in optimizer.param_groups for split in _by_placement(group)]
        if len(groups) > len(optimizer.param_groups):
            self._groups = optimizer.param_groups
            optimizer.param_groups = groups

    def _restore(self, optimizer: Optimizer, *_: object) -> None:
        if self._groups is not None:
            optimizer.param_groups = self._groups
            self._groups = None


def _by_placement(group: Group) -> list[Group]:
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_mesh.setdefault(mesh, []).append(parameter)
    if len(by_mesh) <= 1:
        return [group]
    return [{**group, "params": members} for members in by_mesh.values()]
