"""Error of a step that is not finite: the ranks whose loss is not, and the first bad gradient."""

from __future__ import annotations

import math

import torch
from torch import nn

from plait._torch.dtensor import local_tensor
from plait.cluster.small_messages import all_gather_bytes
from plait.comm.hang import format_ranks
from plait.errors import NumbersError

_ROW_BYTES = 256
"""Bytes that each rank sends: a flag for the loss, and a parameter's name, which may be cut."""


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
        f" {step - 1}. Look at the batch of this step, lower the learning rate or set"
        ' gradient_clipping; faults.non_finite = "skip" leaves such steps out'
    )


def _first_bad_gradient(model: nn.Module) -> str:
    """Return the name of the first parameter on this rank with a non-finite gradient, or ""."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if not bool(torch.isfinite(local_tensor(parameter.grad)).all()):
            return name
    return ""
