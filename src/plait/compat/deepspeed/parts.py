"""Tensors of which ranks hold parts: in full, and from a full value into the parts."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from plait._torch.dtensor import local_tensor, local_window
from plait.errors import InputError


@torch.no_grad()
def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the full value, on this device. Collective where it is split."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


@torch.no_grad()
def write(target: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor, or this rank's part of it, a full value."""
    if value.shape != target.shape:
        raise InputError(
            f"a value of shape {tuple(value.shape)} was given for a parameter of shape"
            f" {tuple(target.shape)}"
        )
    part = value[local_window(target)] if isinstance(target, DTensor) else value
    local_tensor(target.detach()).copy_(part)
