"""An optimizer that updates every parameter inside of the backward, as soon as its gradient is
complete, and frees the gradient.

Only the gradients of the unit that was reduced last are allocated (of one parameter where nothing
is sharded). The optimizer is torch's own, with one parameter per call, so the results are bitwise
equal to those of a step after the backward. Features that need all gradients before the first
update (clipping, an overflow check, accumulation) are refused by the configuration.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from plait._torch.dtensor import local_tensor
from plait.errors import ModelError, PlaitError
from plait.optim.disk_optimizer import is_elementwise
from plait.optim.gradient_math import norms_of
from plait.parallel.hooks import Lost, StepHook


class BackwardOptimizer(StepHook):
    """Drives `optimizer` from the gradients of its parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        if not is_elementwise(optimizer):
            raise ModelError(
                f"parallel.optimizer_in_backward: {type(optimizer).__name__} reads more than one"
                " element of a parameter at a time, and is not proven to be called in the middle"
                " of a backward; use AdamW or another elementwise optimizer of torch, or false"
            )
        self.optimizer = optimizer
        self.looks: list[Callable[[nn.Parameter], None]] = []
        """Called with every parameter whose gradient is complete, just before its update (for
        inspection).
        """
        self._group_of = {
            p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        self._norms: dict[nn.Parameter, torch.Tensor] = {}
        """Of this rank's parts of the gradients of the step that runs."""
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._update)
            for parameter in self._group_of
        ]

    def on_error(self, lost: Lost) -> None:
        """What was updated cannot be taken back."""
        if lost == "step" and self.take_norms():
            raise PlaitError(
                "parallel.optimizer_in_backward: the step failed when some parameters were updated"
                " already; load a checkpoint, or use false"
            )

    def release(self) -> None:
        """Update no more."""
        for handle in self._handles:
            handle.remove()

    def take_norms(self) -> dict[nn.Parameter, torch.Tensor]:
        """What the step's gradients were, by parameter; the next step begins anew."""
        found = self._norms
        self._norms = {}
        return found

    def _update(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        if parameter in self._norms:
            raise ModelError(
                "parallel.optimizer_in_backward: the gradient of a parameter of shape"
                f" {tuple(parameter.shape)} came in two parts, of which the first has been applied"
                " already; call backward() once before step(), or use false"
            )
        for look in self.looks:
            look(parameter)
        self._norms[parameter] = norms_of([local_tensor(parameter.grad)])[0]
        groups = self.optimizer.param_groups
        members = [group["params"] for group in groups]
        try:
            for index, group in enumerate(groups):
                group["params"] = [parameter] if index == self._group_of[parameter] else []
            self.optimizer.step()
        finally:
            for group, parameters in zip(groups, members, strict=True):
                group["params"] = parameters
        parameter.grad = None
