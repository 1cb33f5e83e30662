"""The order of a step after the last backward: finish the reduction, find the global norm, decide,
unscale and clip at once, update.

Gradients are sharded over some axes and replicated over the rest; every one is counted once. The
decision "not finite" depends on the global norm, so every rank takes the same one. A skipped step
changes no state but the loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from plait._torch.dtensor import local_tensor
from plait.cluster.mesh import Mesh
from plait.errors import InputError
from plait.optim.backward_optimizer import BackwardOptimizer
from plait.optim.disk_optimizer import DiskTier
from plait.optim.gradient_math import multiply_all
from plait.optim.gradient_norm import clip_factor, global_norm, norm_of_norms
from plait.optim.lr_schedules import Scheduler, ScheduleSource
from plait.parallel.precision.loss_scale import LossScaler
from plait.parallel.reduction import sharded_axes


@dataclass(frozen=True)
class Outcome:
    """What happened in a step. `grad_norm` is global, unscaled, before clipping; 0-dimensional, on
    the device.
    """

    grad_norm: torch.Tensor
    skipped: bool


@dataclass
class Stepper:
    """Turns reduced gradients into an update."""

    parameters: list[nn.Parameter]
    """All of the model. Those that the optimizer does not hold count in no norm, and keep no
    gradient from step to step.
    """
    mesh: Mesh
    optimizer: torch.optim.Optimizer
    clipping: float
    """Largest global norm; 0 leaves gradients as they are."""
    scaler: LossScaler | None
    non_finite: Literal["raise", "skip"]
    """What becomes of a step whose gradients or loss are not finite. A loss scaler skips it in any
    case.
    """
    asks: bool
    """Whether the norm is read before the update, to decide about it.

    On a GPU that is one wait for the device per step, between the backward and the update. fp16
    needs it by design: the program chooses the loss scale of the next step, and whether the
    learning rate moves, from the answer. bf16.check_grad_overflow and faults.non_finite ask the
    same.
    """
    scheduler: Scheduler | None = None
    tier: DiskTier | None = None
    """Where gradients and optimizer states are, if not in memory."""
    before_update: list[Callable[[], None]] = field(default_factory=list)
    """Called with unscaled, clipped gradients in place, just before the optimizer: those of the
    hooks, and for inspection.
    """
    configured: list[dict[str, Any]] = field(default_factory=list)
    """The values of the optimizer's groups before any schedule or step changed them; a checkpoint
    keeps them (see `engine.resume`).
    """
    schedule_source: ScheduleSource | None = None
    """What `scheduler` was built from; None where it was passed."""
    in_backward: BackwardOptimizer | None = None
    """What has updated the parameters by the end of the backward, if not this."""
    counted_by_others: frozenset[nn.Parameter] = frozenset()
    """Parameters that another pipeline stage holds too, and counts in the norm."""

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before backward."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def __call__(
        self,
        *,
        divisor: float = 1.0,
        loss: Callable[[], torch.Tensor] | None = None,
        error: Callable[[float], Exception] | None = None,
    ) -> Outcome:
        """One update. Gradients hold loss_scale x divisor times the true ones, and are None
        afterwards. `loss`: that of the step over all ranks, where it is known; asked for after the
        norm. `error(norm)` makes what is raised for a step that is not finite, before anything has
        changed; without it, or where such steps are skipped, the outcome says so.
        """
        if self.in_backward is not None:
            return self._after_backward(self.in_backward, divisor)
        inverse = 1.0 / (self.loss_scale * divisor)
        updated = [
            p
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        grads = [p.grad for p in updated]
        counted = grads
        if self.counted_by_others:
            counted = [p.grad for p in updated if p not in self.counted_by_others]
        norm = global_norm(counted, self.mesh, tier=self.tier)
        if inverse != 1.0:
            norm = norm * inverse

        skipped = self.asks and not _are_finite(norm, loss)
        if skipped and self.scaler is None and self.non_finite == "raise" and error is not None:
            raise error(norm.item())
        if not skipped:
            self._rescale(grads, norm, inverse)
            for hook in self.before_update:
                hook()
            self.optimizer.step()
        self.zero_grad()
        if self.scheduler is not None and not skipped:
            self.scheduler.step()
        if self.scaler is not None:
            self.scaler.update(skipped)
        return Outcome(norm, skipped)

    def zero_grad(self) -> None:
        """Drop all gradients, also those of parameters that the optimizer does not hold."""
        for parameter in self.parameters:
            parameter.grad = None

    def _after_backward(self, updated: BackwardOptimizer, divisor: float) -> Outcome:
        if divisor != 1.0:
            raise InputError(
                "parallel.optimizer_in_backward: backward(weight=...) divides when all weights are"
                " known, and the parameters were updated by then; divide the loss before, use"
                " train_batch, or false"
            )
        norms = updated.take_norms()
        held = [p for group in self.optimizer.param_groups for p in group["params"] if p in norms]
        norm = norm_of_norms([(sharded_axes(p), norms[p]) for p in held], self.mesh)
        self.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        return Outcome(norm, skipped=False)

    @torch.no_grad()  # else torch builds a graph for the local part of every gradient
    def _rescale(self, grads: list[torch.Tensor], norm: torch.Tensor, inverse: float) -> None:
        factor: torch.Tensor | float = inverse
        if self.clipping > 0:
            factor = clip_factor(norm, self.clipping)
            if inverse != 1.0:
                factor = factor * inverse
            # Reading a scalar is free on a CPU and saves a pass over all gradients; on a GPU it
            # would stall the queue.
            factor = factor.item() if factor.device.type == "cpu" else factor
        if self.tier is not None and not self.before_update:
            self.tier.scale_in_step(factor)
        elif isinstance(factor, torch.Tensor) or factor != 1.0:
            locals_ = [local_tensor(grad) for grad in grads]
            for some in [locals_] if self.tier is None else self.tier.walk(locals_, write=True):
                multiply_all(some, factor)


def _are_finite(norm: torch.Tensor, loss: Callable[[], torch.Tensor] | None) -> bool:
    """Return whether the norm and, where it is given, the loss are finite. Waits for the device
    once.
    """
    if loss is None:
        return math.isfinite(norm.item())
    # Two reads would stall the stream twice.
    return all(map(math.isfinite, torch.stack([norm, loss()]).tolist()))
