"""The order of a step after the last backward: finish the reduction, find the global norm, decide, unscale and clip at once, update.

Gradients are sharded over some axes and replicated over the rest; every one is counted once. The decision "not finite" depends on the
global norm, so every rank takes the same one. A skipped step changes no state but the loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from plait._torch.dtensor import local_tensor
from plait.cluster.mesh import Mesh
from plait.engine.backward_optimizer import BackwardOptimizer
from plait.engine.disk_optimizer import DiskTier
from plait.engine.gradient_math import multiply_all, norms_of
from plait.engine.schedules import Scheduler, ScheduleSource
from plait.errors import InputError
from plait.parallel.loss_scale import LossScaler


@dataclass(frozen=True)
class Outcome:
    """What happened in a step. `grad_norm` is global, unscaled, before clipping; 0-dimensional, on the device."""

    grad_norm: torch.Tensor
    skipped: bool


@dataclass
class Stepper:
    """Turns reduced gradients into an update."""

    parameters: list[nn.Parameter]
    """All of the model. Those that the optimizer does not hold count in no norm, and keep no gradient from step to step."""
    mesh: Mesh
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler | None
    clipping: float
    """Largest global norm; 0 leaves gradients as they are."""
    scaler: LossScaler | None
    check_overflow: bool
    tier: DiskTier | None = None
    """Where gradients and optimizer states are, if not in memory."""
    before_update: list[Callable[[], None]] = field(default_factory=list)
    """Called with unscaled, clipped gradients in place, just before the optimizer (for inspection)."""
    configured: list[dict[str, Any]] = field(default_factory=list)
    """The values of the optimizer's groups before any schedule or step changed them; a checkpoint keeps them (see `engine.resume`)."""
    schedule_source: ScheduleSource | None = None
    """What `scheduler` was built from; None where it was passed."""
    in_backward: BackwardOptimizer | None = None
    """What has updated the parameters by the end of the backward, if not this."""
    counted_elsewhere: frozenset[nn.Parameter] = frozenset()
    """Parameters that another pipeline stage holds too, and counts in the norm."""

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before backward."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def __call__(self, *, divisor: float = 1.0) -> Outcome:
        """One update. Gradients hold loss_scale x divisor times the true ones, and are None afterwards."""
        if self.in_backward is not None:
            return self._after_backward(self.in_backward, divisor)
        inverse = 1.0 / (self.loss_scale * divisor)
        held = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads = [p.grad for p in held]
        counted = [p.grad for p in held if p not in self.counted_elsewhere]
        norm = global_norm(counted, self.mesh, tier=self.tier) * inverse
        skipped = (self.check_overflow or self.scaler is not None) and not math.isfinite(norm.item())
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
        """Forget all gradients, also those of parameters that the optimizer does not hold."""
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.parameters:
            parameter.grad = None

    def _after_backward(self, updated: BackwardOptimizer, divisor: float) -> Outcome:
        if divisor != 1.0:
            raise InputError(
                "parallel.optimizer_in_backward: backward(weight=...) divides when all weights are known, and the parameters were updated "
                "by then; divide the loss before, use train_batch, or false"
            )
        norms = updated.take_norms()
        held = [p for group in self.optimizer.param_groups for p in group["params"] if p in norms]
        norm = norm_of_norms([(sharded_axes(p), norms[p]) for p in held], self.mesh)
        self.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        return Outcome(norm, skipped=False)

    def _rescale(self, grads: list[torch.Tensor], norm: torch.Tensor, inverse: float) -> None:
        factor: torch.Tensor | float = inverse
        if self.clipping > 0:
            factor = clip_factor(norm, self.clipping) * inverse
            # Reading a scalar is free on a CPU and saves a pass over all gradients; on a GPU it would stall the queue.
            factor = factor.item() if factor.device.type == "cpu" else factor
        if self.tier is not None and not self.before_update:
            self.tier.scale_in_step(factor)
        elif isinstance(factor, torch.Tensor) or factor != 1.0:
            locals_ = [local_tensor(grad) for grad in grads]
            for some in [locals_] if self.tier is None else self.tier.walk(locals_, write=True):
                multiply_all(some, factor)


def clip_factor(norm: torch.Tensor, largest: float) -> torch.Tensor:
    """min(1, largest / (norm + 1e-6)), torch's and DeepSpeed's rule."""
    return torch.clamp(largest / (norm + 1e-6), max=1.0)


def global_norm(grads: Iterable[torch.Tensor], mesh: Mesh, *, tier: DiskTier | None = None) -> torch.Tensor:
    """Euclidean norm over every element of every gradient, each counted once whatever the layout; float64, 0-dimensional."""
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for grad in grads:
        by_axes.setdefault(sharded_axes(grad), []).append(local_tensor(grad))
    return _over_ranks({axes: _joined(_norms(members, tier)) for axes, members in by_axes.items()}, mesh)


def norm_of_norms(norms: Iterable[tuple[tuple[str, ...], torch.Tensor]], mesh: Mesh) -> torch.Tensor:
    """`global_norm`, the same bits, from (sharded axes, `norms.norms_of` this rank's part) of every gradient."""
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for axes, norm in norms:
        by_axes.setdefault(axes, []).append(norm)
    return _over_ranks({axes: _joined(found) for axes, found in by_axes.items()}, mesh)


def _norms(tensors: list[torch.Tensor], tier: DiskTier | None) -> list[torch.Tensor]:
    """Of tensors that need not all be in memory at once."""
    return norms_of(tensors) if tier is None else [norm for some in tier.walk(tensors) for norm in norms_of(some)]


def _joined(norms: list[torch.Tensor]) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]), 2.0)


def _over_ranks(by_axes: dict[tuple[str, ...], torch.Tensor], mesh: Mesh) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    # Sorted, so that ranks which hold different sets of parameters issue their collectives in one order.
    for axes, norm in sorted(by_axes.items(), key=lambda entry: entry[0]):
        square = (norm**2).to(mesh.device)  # gradients may be on the host
        group = mesh.group(*axes)
        if group is not None:
            dist.all_reduce(square, group=group)
        total = total + square
    stages = mesh.group("pp")
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def sharded_axes(tensor: torch.Tensor) -> tuple[str, ...]:
    """The mesh axes over which a tensor is split; none for a replicated or plain one."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    return tuple(name for name, placement in zip(names, tensor.placements, strict=True) if not placement.is_replicate())
