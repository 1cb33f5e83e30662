"""Optimizer step on reduced gradients: norm, decision to skip, clipping, update.

The global norm counts each element once on every layout and needs one all-reduce. The error of a
step that is not finite names the first bad gradient, and the ranks whose loss is not finite.

Note [Skipping a step]
    All ranks must apply or skip a step together, otherwise their weights diverge. The decision
    depends on the global norm and on the global loss only, and both are the same number on every
    rank after their all-reduce. A skipped step changes no state except the loss scale: neither
    parameters nor optimizer states nor the LR schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from plait._torch.tensors import local_tensor
from plait.cluster.mesh import Mesh
from plait.cluster.small_messages import all_gather_bytes
from plait.comm.hang import format_ranks
from plait.errors import InputError, NumbersError
from plait.optim.backward_optimizer import BackwardOptimizer
from plait.optim.disk_optimizer import DiskTier
from plait.optim.gradient_math import joined_norm, multiply_all, norms_of
from plait.optim.lr_schedules import Scheduler, ScheduleSource
from plait.parallel.parameter_layout import Reduction, sharded_axes
from plait.parallel.techniques.mixed_precision import LossScaler


@dataclass(frozen=True)
class StepOutcome:
    """Result of an optimizer step.

    Attributes:
        grad_norm: Global norm of the unscaled gradients before clipping: 0-dimensional, float64,
            on the device.
        skipped: Whether the step was skipped. See Note [Skipping a step].
    """

    grad_norm: torch.Tensor
    skipped: bool


@dataclass
class Stepper:
    """Callable that applies reduced gradients to the parameters of a model."""

    parameters: list[nn.Parameter]
    """Parameters whose gradients are dropped after each step.

    Parameters that the optimizer does not update are included, but do not count in the norm.
    """
    mesh: Mesh
    optimizer: torch.optim.Optimizer
    clipping: float
    """Largest global norm of the gradients. 0 disables clipping."""
    scaler: LossScaler | None
    non_finite: Literal["raise", "skip"]
    """Action for a step with a non-finite norm or loss. With a loss scaler the step is skipped."""
    checks_finite: bool
    """True to read the norm before the update, and to skip or refuse the step if it is not finite.

    On a GPU this waits for the device once per step, between the backward and the update. fp16
    needs it by design: the loss scale of the next step depends on the answer, and so does the LR
    schedule. `bf16.check_grad_overflow` and `faults.non_finite` need it too.
    """
    scheduler: Scheduler | None = None
    tier: DiskTier | None = None
    """Files with gradients, optimizer states or parameters, or None if all are in memory."""
    before_update: list[Callable[[], None]] = field(default_factory=list)
    """Callbacks between clipping and the optimizer, for step hooks and for inspection."""
    configured: list[dict[str, Any]] = field(default_factory=list)
    """Values of the optimizer's parameter groups before any schedule or step changed them.

    A checkpoint stores them (see `engine.resume`).
    """
    schedule_source: ScheduleSource | None = None
    """Specification that `scheduler` was built from, or None if the caller passed a scheduler."""
    in_backward: BackwardOptimizer | None = None
    """Optimizer that updates the parameters during the backward instead of this step."""
    counted_by_other_stage: frozenset[nn.Parameter] = frozenset()
    """Tied parameters whose gradient another pipeline stage adds to the norm."""

    @property
    def loss_scale(self) -> float:
        """Factor by which losses are multiplied before their backward."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def __call__(
        self,
        *,
        divisor: float = 1.0,
        loss: Callable[[], torch.Tensor] | None = None,
        non_finite_error: Callable[[float], Exception] | None = None,
    ) -> StepOutcome:
        """Update the parameters and drop all gradients. Collective.

        Args:
            divisor: Number that the gradients are divided by, in addition to the loss scale.
            loss: Returns the global loss of the step (0-dimensional). It may wait for an all-reduce
                that is already running, so it is called after the norm has been computed: the
                computation of the norm overlaps with this all-reduce.
            non_finite_error: Builds the exception for a non-finite step from its norm. Without it
                such a step is skipped.

        Returns:
            The global norm before clipping, and whether the step was skipped.

        Raises:
            Exception: The result of `non_finite_error`. No state has changed by then.
            InputError: `divisor` is not 1 and the parameters were updated during the backward.
        """
        if self.in_backward is not None:
            return self._finish_update_in_backward(self.in_backward, divisor)

        unscale = 1.0 / (self.loss_scale * divisor)
        updated = [
            parameter
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        counted = [p for p in updated if p not in self.counted_by_other_stage]
        norm = global_norm([p.grad for p in counted], self.mesh, tier=self.tier)
        # The norm is multiplied instead of every gradient. Gradients are unscaled once, together
        # with clipping.
        if unscale != 1.0:
            norm = norm * unscale

        # See Note [Skipping a step].
        skipped = self.checks_finite and not _are_finite(norm, loss)
        # An overflow is an ordinary event of dynamic loss scaling, which skips the step.
        raises = self.scaler is None and self.non_finite == "raise"
        if skipped and raises and non_finite_error is not None:
            raise non_finite_error(norm.item())

        if not skipped:
            self._unscale_and_clip([parameter.grad for parameter in updated], norm, unscale)
            for callback in self.before_update:
                callback()
            self.optimizer.step()
        self.zero_grad()

        if self.scheduler is not None and not skipped:
            self.scheduler.step()
        if self.scaler is not None:
            self.scaler.update(skipped)
        return StepOutcome(norm, skipped)

    def zero_grad(self) -> None:
        """Drop all gradients, including those of parameters that the optimizer does not hold."""
        for parameter in self.parameters:
            parameter.grad = None

    def _finish_update_in_backward(
        self, optimizer: BackwardOptimizer, divisor: float
    ) -> StepOutcome:
        if divisor != 1.0:
            raise InputError(
                "parallel.optimizer_in_backward: backward(weight=...) divides when all weights are"
                " known, and the parameters were updated by then; divide the loss before its"
                " backward, use train_batch, or set parallel.optimizer_in_backward = false"
            )
        norms = optimizer.take_norms()

        # The order of the optimizer's groups, so that the sum has the same rounding as in
        # `global_norm`. `norms` is in the order in which the backward completed gradients.
        updated = [
            p for group in self.optimizer.param_groups for p in group["params"] if p in norms
        ]
        norm = norm_of_norms([(sharded_axes(p), norms[p]) for p in updated], self.mesh)

        self.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        return StepOutcome(norm, skipped=False)

    @torch.no_grad()  # Otherwise torch records a graph for the local part of every gradient.
    def _unscale_and_clip(
        self, grads: list[torch.Tensor], norm: torch.Tensor, unscale: float
    ) -> None:
        factor: torch.Tensor | float = unscale
        if self.clipping > 0:
            factor = clip_factor(norm, self.clipping)
            if unscale != 1.0:
                factor = factor * unscale
            # A CPU scalar is free to read, and a factor of 1 saves a pass over all gradients. On a
            # GPU the read would stall the stream.
            if factor.device.type == "cpu":
                factor = factor.item()

        if self.tier is not None and not self.before_update:
            # No callback reads the gradients, so they can be multiplied when the optimizer step
            # fetches them from the disk. This saves one pass over the files.
            self.tier.scale_in_step(factor)
            return

        if not isinstance(factor, torch.Tensor) and factor == 1.0:
            return
        local_grads = [local_tensor(grad) for grad in grads]
        if self.tier is None:
            multiply_all(local_grads, factor)
            return
        for buffered in self.tier.walk(local_grads, write=True):
            multiply_all(buffered, factor)


def _are_finite(norm: torch.Tensor, loss: Callable[[], torch.Tensor] | None) -> bool:
    """Return True if the norm and, if it is known, the loss are finite. Waits for the device once.

    Args:
        norm: 0-dimensional, float64.
        loss: Returns the loss, 0-dimensional, float64.
    """
    if loss is None:
        return math.isfinite(norm.item())
    # Reading two scalars one after the other would stall the stream twice.
    return all(map(math.isfinite, torch.stack([norm, loss()]).tolist()))


def clip_factor(norm: torch.Tensor, largest: float) -> torch.Tensor:
    """Return min(1, largest / (norm + 1e-6)), as torch and DeepSpeed do."""
    return torch.clamp(largest / (norm + 1e-6), max=1.0)


@torch.no_grad()
def global_norm(
    grads: Iterable[torch.Tensor], mesh: Mesh, *, tier: DiskTier | None = None
) -> torch.Tensor:
    """Return the Euclidean norm over all gradients: 0-dimensional, float64.

    Collective over the ranks that hold parts of the same replica of the model.

    Args:
        grads: Gradients of this rank, plain or DTensor.
        mesh: Mesh of the ranks.
        tier: Files with the gradients, if they are not all in memory at once.
    """
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for grad in grads:
        by_axes.setdefault(sharded_axes(grad), []).append(local_tensor(grad))

    local_norms: dict[tuple[str, ...], torch.Tensor] = {}
    for axes, members in by_axes.items():
        if tier is None:
            norms = norms_of(members)
        else:
            norms = [norm for buffered in tier.walk(members) for norm in norms_of(buffered)]
        local_norms[axes] = joined_norm(norms)
    return _norm_over_ranks(local_norms, mesh)


@torch.no_grad()
def norm_of_norms(
    norms: Iterable[tuple[tuple[str, ...], torch.Tensor]], mesh: Mesh
) -> torch.Tensor:
    """Return a result bitwise equal to `global_norm`, from norms of local gradients.

    Collective over the ranks that hold parts of the same replica of the model.

    Args:
        norms: (mesh dimensions that shard the gradient, norm of this rank's shard as `norms_of`
            returns it) for every gradient, in the order of `global_norm`.
        mesh: Mesh of the ranks.
    """
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for axes, norm in norms:
        by_axes.setdefault(axes, []).append(norm)
    return _norm_over_ranks({axes: joined_norm(members) for axes, members in by_axes.items()}, mesh)


def _norm_over_ranks(by_axes: Mapping[tuple[str, ...], torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """Return the global norm from local norms, keyed by the mesh dimensions of their shards."""
    squares = []
    # Sorted, so that the rounding of the sum does not depend on the order of parameters.
    for axes, norm in sorted(by_axes.items(), key=lambda entry: entry[0]):
        square = (norm**2).to(mesh.device)  # Gradients may be on the host.
        # If another rank counts a replica, 0 times the square is added here. This keeps NaN and
        # infinity.
        squares.append(square if Reduction(axes).counts_in_norm(mesh.coordinates) else square * 0)

    if squares:
        total = sum(squares[1:], squares[0])
    else:
        # A pipeline stage may have nothing to train.
        total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    group = mesh.group(*mesh.norm_axes)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()


_ROW_BYTES = 256
"""Bytes that each rank sends: a flag for the loss, and a truncated name of a parameter."""


def non_finite_error(
    model: nn.Module, *, step: int, norm: float, loss: float | None, device: torch.device
) -> NumbersError:
    """Return the error of a step whose gradients or loss are not finite. Collective.

    Args:
        model: The model with the gradients of the step.
        step: Number of the step.
        norm: Global norm of the gradients.
        loss: Loss of this rank, if it is known.
        device: Device for the exchange between ranks.
    """
    # One row per rank: flag of the loss, name of the first bad gradient (UTF-8).
    is_bad_loss = loss is not None and not math.isfinite(loss)
    name = _first_bad_gradient(model).encode()[: _ROW_BYTES - 1]
    row = bytes([is_bad_loss]) + name
    rows = all_gather_bytes(row.ljust(_ROW_BYTES, b"\0"), device)

    causes = []
    bad_losses = [rank for rank, row in enumerate(rows) if row[0]]
    if bad_losses:
        causes.append(f"the loss of {format_ranks(bad_losses)} is not finite")
    bad_gradients = [rank for rank, row in enumerate(rows) if row[1]]
    if bad_gradients:
        rank = bad_gradients[0]
        parameter = rows[rank][1:].rstrip(b"\0").decode(errors="replace")
        causes.append(f"the gradient of `{parameter}` on rank {rank} is the first that is not")

    cause = "; ".join(causes) or f"the norm of all gradients is {norm}"
    return NumbersError(
        f"step {step}: {cause}. Nothing was updated: parameters and optimizer are those of step"
        f" {step - 1}. Look at the batch of this step, lower the learning rate, set"
        ' gradient_clipping, or skip such steps with faults.non_finite = "skip"'
    )


def _first_bad_gradient(model: nn.Module) -> str:
    """Return the name of the first parameter on this rank with a non-finite gradient, or ""."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if not bool(torch.isfinite(local_tensor(parameter.grad)).all()):
            return name
    return ""
