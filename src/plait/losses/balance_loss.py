"""The loss of a mixture-of-experts model's routers, added to that of its tokens as Transformers does.

`model(..., labels=...)` of Transformers returns, for one micro-batch, the mean cross entropy plus `router_aux_loss_coef` times the balance
loss. A step's loss is the mean of these over its micro-batches on all ranks, each weighted by its number of targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait.losses.loss import CausalLMLoss, Loss
from plait.model.experts import adds_balance_loss
from plait.parallel.experts.router_statistics import RouterStatistics


@dataclass(frozen=True)
class BalancedLoss:
    """`inner`, and the balance loss of every micro-batch as often as it has targets."""

    inner: CausalLMLoss
    coefficient: float
    statistics: RouterStatistics | None = None
    """Where the routers are on several pipeline stages, or see parts of sequences; otherwise the model's output has the balance loss."""

    @property
    def split_logits(self) -> bool:
        """See `CausalLMLoss`."""
        return self.inner.split_logits

    def __call__(self, output: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = self.inner(output, batch)
        balance = self.statistics.loss() if self.statistics is not None else getattr(output, "aux_loss", None)
        if balance is None:
            return total, weight
        return total + balance * weight * self.coefficient, weight  # a number times an integer tensor would be of float32

    def weight(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Number of targets, int64."""
        return self.inner.weight(batch)


def with_balance_loss(loss: Loss | None, model: nn.Module, statistics: RouterStatistics | None = None) -> Loss | None:
    """`loss` with the balance loss of a model of Transformers whose own loss has one: of `CausalLMLoss`, because another one may add
    `output.aux_loss` itself."""
    if not isinstance(loss, CausalLMLoss) or _is_own(loss) or not adds_balance_loss(model):
        return loss
    return BalancedLoss(loss, float(model.router_aux_loss_coef), statistics)  # type: ignore[arg-type]


def without_balance_loss(loss: Any) -> Any:
    """What it was made of: what a pipeline checks, because the balance loss is sent along with the activations."""
    return loss.inner if isinstance(loss, BalancedLoss) else loss


def _is_own(loss: CausalLMLoss) -> bool:
    """Whether a subclass of a user's computes the loss itself."""
    return not type(loss).__module__.startswith("plait.losses.")
