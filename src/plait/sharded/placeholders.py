"""Gradients that a user's own training loop drops between two micro-batches.

Note [Placeholders of gradients]
    A parameter of a sharded unit has two tensors: its shard, which the user's optimizer holds, and
    the gathered parameter, which the model holds while it is gathered. Inside of `accumulate` a
    gradient belongs to one of them: to the gathered parameter until it is reduced (ZeRO stage 1),
    to the shard afterwards (stage 2). Where the other one has no gradient, `optimizer.zero_grad()`
    or `model.zero_grad()` could not drop it, and it would be added to the next step.

    Between two backwards the other tensor therefore has a placeholder as its gradient: a single
    NaN, expanded to its shape, so that it takes no memory. If the placeholder is gone or zeroed
    when the next backward or step begins, the gradient is dropped too. Code that computes with the
    placeholder gets NaN, or an error of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait._torch.passes import around_backward
from plait._torch.tensors import local_tensor, version_of
from plait._torch.units import (
    drop_unreduced,
    unreduced_parameters,
    visible_gathered_parameters,
)
from plait.parallel.data.unused import UnusedTracker
from plait.parallel.parameter_layout import like_parameter


@dataclass(frozen=True)
class GradientPlaceholder:
    """Gradient that the user can drop, in place of one that the user cannot."""

    shard: nn.Parameter
    """Shard of the parameter whose gradient it stands for."""
    parameter: nn.Parameter
    """The shard or the gathered parameter, which has `gradient`."""
    gradient: torch.Tensor
    """The placeholder, or a gradient of an earlier step that the user has not dropped."""
    version: int
    """`_versions_of` the gradient when it was assigned."""
    is_earlier: bool

    @property
    def is_dropped(self) -> bool:
        """True if the user has dropped or zeroed the gradient."""
        if self.parameter.grad is not self.gradient:
            return True
        # Reading the values waits for the device, so only a changed gradient is read.
        if _versions_of(self.gradient) == self.version:
            return False
        return not bool(local_tensor(self.gradient).any())

    def remove(self) -> None:
        """Set the gradient to None, unless it is not the placeholder."""
        if self.parameter.grad is self.gradient and not self.is_earlier:
            self.parameter.grad = None


class GradientPlaceholders:
    """Placeholders of a model. See Note [Placeholders of gradients].

    Args:
        model: The sharded model.
        unused: Tracker of the parameters that a step uses, if there is one.
    """

    def __init__(self, model: nn.Module, unused: UnusedTracker | None) -> None:
        self._model = model
        self._unused = unused
        self._unreduced: list[tuple[Any, list[GradientPlaceholder]]] = []
        """Placeholders on shards, per parameter group."""
        self._gathered: list[GradientPlaceholder] = []
        """Placeholders on gathered parameters, for gradients of their shards."""
        # The tracker of unused parameters must not see the placeholders. The hook that is
        # registered last begins first.
        around_backward(model, begin=self.settle, end=self._place)

    def _place(self) -> None:
        self._unreduced = [
            (group, [_placeholder(shard, shard) for shard in shards])
            for group, shards in unreduced_parameters(self._model)
        ]
        self._gathered = [
            _placeholder(shard, gathered)
            for shard, gathered in visible_gathered_parameters(self._model)
            if shard.grad is not None and gathered.grad is None
        ]

    def settle(self) -> None:
        """Remove the placeholders, and drop the gradients whose placeholder is gone.

        Raises:
            InputError: The user has dropped a part of gradients that are reduced together.
        """
        unreduced = self._unreduced
        gathered = self._gathered
        self._unreduced = []
        self._gathered = []
        dropped = [placeholder.shard for placeholder in gathered if placeholder.is_dropped]
        dropped_ids = {id(shard) for shard in dropped}
        of_groups = [
            (group, [p.shard for p in members if p.is_dropped or id(p.shard) in dropped_ids])
            for group, members in unreduced
        ]
        for placeholder in (*gathered, *(p for _, members in unreduced for p in members)):
            placeholder.remove()

        for shard in dropped:
            shard.grad = None
        for group, shards in of_groups:
            if shards:
                drop_unreduced(group, shards)
                dropped += shards
        if self._unused is not None:
            self._unused.forget(dropped)


def _placeholder(shard: nn.Parameter, parameter: nn.Parameter) -> GradientPlaceholder:
    gradient = parameter.grad
    is_earlier = gradient is not None
    if gradient is None:
        local = local_tensor(parameter.detach())
        nan = torch.full((), torch.nan, dtype=local.dtype, device=local.device)
        gradient = like_parameter(nan.expand(local.shape), parameter)
        parameter.grad = gradient
    return GradientPlaceholder(shard, parameter, gradient, _versions_of(gradient), is_earlier)


def _versions_of(gradient: torch.Tensor) -> int:
    """Return a number that grows with every change in place."""
    # An operation on a DTensor does not count as a change of its local tensor.
    return version_of(gradient) + version_of(local_tensor(gradient))
