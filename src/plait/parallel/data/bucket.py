"""Where the reducer keeps gradients: buckets, and every parameter's place in one."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(eq=False)
class Bucket:
    """Gradients that are reduced together. `flat` [numel] holds them, one after the other, each in
    its parameter's memory layout.
    """

    parameters: list[nn.Parameter]
    flat: torch.Tensor
    wire: torch.Tensor
    """What is summed over the ranks: `flat` itself, or a buffer in the reduction's dtype."""
    index: int
    slots: range
    """Those of its parameters."""
    missing: set[int] = field(default_factory=set)
    """Slots whose gradient has not arrived in this round."""
    launched: bool = False
    reduced: torch.Tensor | None = None
    """What earlier rounds of the step have summed, while another one runs."""


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a bucket."""

    bucket: Bucket
    view: torch.Tensor
    grad: torch.Tensor
    """What the parameter's `grad` is set to: the view, or for a parameter split over tp a DTensor
    around it.
    """
    index: int
