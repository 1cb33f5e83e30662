"""Router losses of a mixture-of-experts model, which are added to its token loss.

`model(..., labels=...)` of Transformers returns, for one micro-batch, the mean cross entropy plus
`router_aux_loss_coef` times the balance loss. The loss of a step is the mean of these losses over
the micro-batches of all ranks. Each micro-batch is weighted by its number of targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait.errors import ConfigError, Problem
from plait.losses.loss import CausalLMLoss, Loss
from plait.model.experts import balance_coefficient
from plait.parallel.experts.router_statistics import RouterStatistics


def with_balance_loss(
    loss: Loss | None, model: nn.Module, statistics: RouterStatistics | None = None
) -> Loss | None:
    """Add the balance loss of a Transformers model, if it has one, to its token loss.

    It is added to `CausalLMLoss` only, because another loss may add `output.aux_loss` itself.

    Args:
        loss: The loss of the tokens.
        model: The model.
        statistics: Statistics of its routers, for router losses that the model does not compute
            itself, or None.

    Raises:
        ConfigError: A setting needs a router loss from `statistics`, but router losses cannot be
            added to `loss`.
    """
    # A class of the user computes the loss itself.
    is_user_defined = not type(loss).__module__.startswith("plait.losses.")
    if not isinstance(loss, CausalLMLoss) or is_user_defined:
        if statistics is not None:
            _refuse_statistics(loss, statistics)
        return loss
    coefficient = balance_coefficient(model)
    if statistics is None and coefficient is None:
        return loss
    if statistics is not None and not statistics.balances:
        coefficient = 0.0
    return BalancedLoss(loss, coefficient or 0.0, statistics)


def _refuse_statistics(loss: Loss | None, statistics: RouterStatistics) -> None:
    """Raise ConfigError for a setting whose router loss cannot be added to this loss."""
    name = "none" if loss is None else type(loss).__name__
    rule = f"it is added to plait.causal_lm_loss, and the loss is {name}"
    remedy = "pass loss_fn=plait.causal_lm_loss, or use"
    if statistics.z_loss:
        raise ConfigError(Problem("experts.z_loss", statistics.z_loss, rule, f"{remedy} 0"))
    if statistics.is_global:
        raise ConfigError(Problem("experts.balance", "global", rule, f'{remedy} "micro_batch"'))
    if statistics.balances:
        rule = (
            "with parallel.pp or parallel.cp the balance loss is a sum over ranks, which no"
            f" output holds; {rule}"
        )
        raise ConfigError(
            Problem("model.config.output_router_logits", True, rule, f"{remedy} False")
        )


def without_balance_loss(loss: Any) -> Any:
    """Return the token loss without the router losses.

    A pipeline checks only this part, because router statistics are sent with the activations.
    """
    return loss.inner if isinstance(loss, BalancedLoss) else loss


@dataclass(frozen=True)
class BalancedLoss:
    """Token loss, plus the product of the router losses and the micro-batch's target count."""

    inner: CausalLMLoss
    coefficient: float
    """Coefficient of the balance loss. 0 means that there is none."""
    statistics: RouterStatistics | None = None
    """Statistics for a z loss, or for a balance loss that the model's output does not have."""

    @property
    def split_logits(self) -> bool:
        """True if the loss accepts logits that are split along the vocabulary."""
        return self.inner.split_logits

    def __call__(
        self, output: Any, batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = self.inner(output, batch)
        balance: torch.Tensor | None = getattr(output, "aux_loss", None)
        if self.statistics is not None:
            balance, z = self.statistics.losses()
            if self.statistics.z_loss:
                total = total + z * weight
        if balance is None or not self.coefficient:
            return total, weight
        # The order matters: a number times the integer weight would be float32.
        return total + balance * weight * self.coefficient, weight

    def weight(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the number of targets, int64."""
        return self.inner.weight(batch)
