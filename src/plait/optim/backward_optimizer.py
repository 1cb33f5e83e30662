"""Optimizer that updates each parameter during the backward and frees its gradient.

A parameter is updated as soon as its gradient is complete. At any time only the gradients of one
FSDP unit are allocated, the one that was reduced last. If nothing is sharded, only the gradient of
one parameter is allocated. The optimizer is torch's own, with one parameter per call, so the
results are bitwise equal to those of a step after the backward. The configuration refuses features
that need all gradients before the first update: clipping, an overflow check, accumulation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from plait._torch.tensors import local_tensor
from plait.errors import ModelError, PlaitError
from plait.optim.disk_optimizer import is_elementwise
from plait.optim.gradient_math import norms_of
from plait.parallel.hooks import FailureScope, StepHook


class BackwardOptimizer(StepHook):
    """Optimizer that is called from the gradient hooks of its parameters.

    Args:
        optimizer: An elementwise optimizer of torch.

    Attributes:
        inspectors: Callbacks. Each is called with every parameter whose gradient is complete,
            before that parameter is updated.

    Raises:
        ModelError: The optimizer is not elementwise.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not is_elementwise(optimizer):
            raise ModelError(
                f"parallel.optimizer_in_backward: {type(optimizer).__name__} reads more than one"
                " element of a parameter at a time, and is not tested in the middle of a backward;"
                " use AdamW or another elementwise optimizer of torch, or set"
                " parallel.optimizer_in_backward to false"
            )
        self.optimizer = optimizer
        self.inspectors: list[Callable[[nn.Parameter], None]] = []
        self._group_of = {
            p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        self._norms: dict[nn.Parameter, torch.Tensor] = {}
        """Norms of this rank's shards of the current step's gradients."""
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._update)
            for parameter in self._group_of
        ]

    def on_error(self, lost: FailureScope) -> None:
        """Raise PlaitError if the failed step has already updated parameters."""
        if lost == "step" and self.take_norms():
            raise PlaitError(
                "parallel.optimizer_in_backward: the step failed after some parameters were"
                " updated; load a checkpoint, or start again with"
                " parallel.optimizer_in_backward = false"
            )

    def release(self) -> None:
        """Remove the gradient hooks, so that the backward no longer updates parameters."""
        for handle in self._handles:
            handle.remove()

    def take_norms(self) -> dict[nn.Parameter, torch.Tensor]:
        """End the step. Return the norm of this rank's shard of every gradient, by parameter."""
        norms = self._norms
        self._norms = {}
        return norms

    def _update(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        if parameter in self._norms:
            raise ModelError(
                "parallel.optimizer_in_backward: the gradient of a parameter of shape"
                f" {tuple(parameter.shape)} came in two parts, of which the first has been applied"
                " already; call backward() once before step(), or set"
                " parallel.optimizer_in_backward to false"
            )
        for look in self.inspectors:
            look(parameter)
        # The gradient no longer exists when the step needs the global norm.
        self._norms[parameter] = norms_of([local_tensor(parameter.grad)])[0]

        # The groups keep their values (learning rate, betas), and only this parameter is stepped.
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
