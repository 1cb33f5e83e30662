"""What was not finite in a step, once it is known that something was: whose loss, and the gradient
of which parameter first.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from plait._torch.dtensor import local_tensor
from plait._torch.flat_collectives import all_gather_single
from plait.comm.hang import names
from plait.errors import NumbersError

_LONGEST = 256


def first_bad_gradient(model: nn.Module) -> str:
    """The first parameter of this rank whose gradient has an element that is not finite; empty
    where there is none.
    """
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(
            torch.isfinite(local_tensor(parameter.grad)).all()
        ):
            return name
    return ""


def not_finite(
    model: nn.Module, *, step: int, norm: float, loss: float | None, device: torch.device
) -> NumbersError:
    """The error of a step whose gradients, or whose loss, are not finite. `loss`: this rank's own,
    where it knows. Collective over all ranks.
    """
    own = first_bad_gradient(model)
    rows = _gathered(
        bytes([loss is not None and not math.isfinite(loss)]) + own.encode()[: _LONGEST - 1], device
    )
    losses = [rank for rank, row in enumerate(rows) if row[0]]
    found = [
        (rank, row[1:].rstrip(b"\0").decode(errors="replace"))
        for rank, row in enumerate(rows)
        if row[1]
    ]
    parts = [f"the loss of {names(losses)} is not finite"] if losses else []
    if found:
        rank, name = found[0]
        parts.append(f"the gradient of `{name}` on rank {rank} is the first that is not")
    said = "; ".join(parts) or f"the norm of all gradients is {norm}"
    return NumbersError(
        f"step {step}: {said}. Nothing was updated: parameters and optimizer are those of step"
        f" {step - 1}. Look at the batch of this step, lower the learning rate or set"
        ' gradient_clipping; faults.non_finite = "skip" leaves such steps out'
    )


def _gathered(row: bytes, device: torch.device) -> list[bytes]:
    padded = row.ljust(_LONGEST, b"\0")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [padded]
    mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
    everyone = mine.new_empty(dist.get_world_size() * _LONGEST)
    all_gather_single(everyone, mine)
    return [bytes(one) for one in everyone.cpu().view(-1, _LONGEST).numpy()]
