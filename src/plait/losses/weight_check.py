"""Whether the weight that a loss returns is the one that its step was divided by.

`train_batch` divides before the first backward, by what the loss's `weight` says of the batch
alone. A loss that then counts something else would be scaled wrongly without a sign of it. Both are
summed over the ranks anyway.
"""

from __future__ import annotations

from typing import Any

import torch

from plait.cluster.host_copy import HostCopy
from plait.errors import InputError
from plait.losses.chunked_loss import ChunkedCausalLMLoss
from plait.losses.loss import CausalLMLoss, Loss, PerSample

_CONSISTENT = (CausalLMLoss, ChunkedCausalLMLoss, PerSample)
"""Losses that count once, or twice the same."""
_ROUNDING = 1e-6
"""Of sums of weights that are no whole numbers, relative."""


class WeightCheck:
    """Call once a step. On a GPU the numbers are read a step later, when they are there, so that
    nothing waits for them.
    """

    def __init__(self) -> None:
        self._tolerance = _ROUNDING
        self._copied: tuple[HostCopy, int] | None = None
        """Weights of the step before, and its number."""

    def applies_to(self, loss_fn: Loss) -> bool:
        """Return whether a loss could count otherwise in its sum than in its `weight`."""
        return type(loss_fn) not in _CONSISTENT

    def note(self, weight: Any) -> None:
        """A weight of coarse numbers is known to their digits only."""
        if isinstance(weight, torch.Tensor) and weight.is_floating_point():
            self._tolerance = max(self._tolerance, 2 * torch.finfo(weight.dtype).eps)

    def __call__(self, *, divided_by: torch.Tensor, returned: torch.Tensor, step: int) -> None:
        """Both weights are 0-dimensional, summed over all ranks. Raises InputError, on all
        ranks.
        """
        if divided_by.device.type == "cpu":
            self._compare(float(divided_by), float(returned), step)
            return
        before = self._copied
        weights = torch.stack([divided_by.double(), returned.double()])
        self._copied = HostCopy(weights), step
        if before is not None:
            copy, earlier = before
            earlier_divisor, earlier_sum = copy.values().tolist()
            self._compare(earlier_divisor, earlier_sum, earlier)

    def _compare(self, divided_by: float, returned: float, step: int) -> None:
        if not abs(divided_by - returned) <= self._tolerance * max(abs(divided_by), abs(returned)):
            raise InputError(
                f"step {step}: the loss returned weights that add up to {returned:g}, and its"
                f" weight function (weight_fn, or the loss's `weight`) said {divided_by:g} of the"
                " same batch; train_batch divides by the second, before the first backward, so"
                " both must count the same"
            )
