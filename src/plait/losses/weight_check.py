"""Check that the weight which a loss returns is the one that its step was divided by.

`train_batch` divides before the first backward by `Loss.weight` of the batch (Note [Weight of a
loss]). A loss that returns another weight would be scaled wrongly, without any visible sign. Both
weights are summed over the ranks in any case, so the check costs no communication.
"""

from __future__ import annotations

from typing import Any

import torch

from plait.cluster.host_copy import HostCopy
from plait.errors import InputError
from plait.losses.chunked_loss import ChunkedCausalLMLoss
from plait.losses.loss import CausalLMLoss, Loss, PerSample

_CONSISTENT = (CausalLMLoss, ChunkedCausalLMLoss, PerSample)
"""Losses whose two weights are always the same."""
_ROUNDING = 1e-6
"""Relative tolerance for sums of weights that are not integers."""


class WeightCheck:
    """Compares the two weights of a step. It is called once per step.

    On a GPU the weights are read one step later, when their copy has arrived, so that nothing waits
    for the device.
    """

    def __init__(self) -> None:
        self._tolerance = _ROUNDING
        self._copied: tuple[HostCopy, int] | None = None
        """Weights of the previous step and its number."""

    def applies_to(self, loss_fn: Loss) -> bool:
        """Return True if a loss may return another weight than its `weight` function."""
        return type(loss_fn) not in _CONSISTENT

    def note(self, weight: Any) -> None:
        """Adapt the tolerance to the dtype of a weight."""
        if isinstance(weight, torch.Tensor) and weight.is_floating_point():
            self._tolerance = max(self._tolerance, 2 * torch.finfo(weight.dtype).eps)

    def __call__(self, *, divided_by: torch.Tensor, returned: torch.Tensor, step: int) -> None:
        """Compare the weights of a step, both summed over all ranks.

        Args:
            divided_by: Weight before the forward, 0-dimensional.
            returned: Weight that the loss returned, 0-dimensional.
            step: Number of the step.

        Raises:
            InputError: They differ. It is raised on all ranks.
        """
        # On a CPU reading the numbers waits for nothing.
        if divided_by.device.type == "cpu":
            self._compare(float(divided_by), float(returned), step)
            return
        previous = self._copied
        weights = torch.stack([divided_by.double(), returned.double()])
        self._copied = (HostCopy(weights), step)
        if previous is not None:
            copy, previous_step = previous
            previous_divided_by, previous_returned = copy.values().tolist()
            self._compare(previous_divided_by, previous_returned, previous_step)

    def _compare(self, divided_by: float, returned: float, step: int) -> None:
        if not abs(divided_by - returned) <= self._tolerance * max(abs(divided_by), abs(returned)):
            raise InputError(
                f"step {step}: the loss returned weights that add up to {returned:g}, and its"
                f" weight function (weight_fn, or the loss's `weight`) said {divided_by:g} of the"
                " same batch; train_batch divides by the second, before the first backward, so"
                " both must count the same"
            )
