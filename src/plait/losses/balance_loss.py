"""The losses of a mixture-of-experts model's routers, added to that of its tokens as Transformers
does.

`model(..., labels=...)` of Transformers returns, for one micro-batch, the mean cross entropy plus
`router_aux_loss_coef` times the balance loss. A step's loss is the mean of these over its
micro-batches on all ranks, each weighted by its number of targets.
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


@dataclass(frozen=True)
class BalancedLoss:
    """`inner`, and the losses of routers of every micro-batch as often as it has targets."""

    inner: CausalLMLoss
    coefficient: float
    """Of the balance loss; 0 for none."""
    statistics: RouterStatistics | None = None
    """Where there is a z loss, or a balance loss that the model's output does not have."""

    @property
    def split_logits(self) -> bool:
        """See `CausalLMLoss`."""
        return self.inner.split_logits

    def __call__(
        self, output: Any, batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = self.inner(output, batch)
        balance: torch.Tensor | None = getattr(output, "aux_loss", None)
        if self.statistics is not None:
            balance, z = self.statistics.losses()
            total = total + z * weight if self.statistics.z_loss else total
        if balance is None or not self.coefficient:
            return total, weight
        # a number times an integer tensor would be of float32
        return (total + balance * weight * self.coefficient, weight)

    def weight(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Number of targets, int64."""
        return self.inner.weight(batch)


def with_balance_loss(
    loss: Loss | None, model: nn.Module, statistics: RouterStatistics | None = None
) -> Loss | None:
    """`loss` with the balance loss of a model of Transformers whose own loss has one: of
    `CausalLMLoss`, because another one may add `output.aux_loss` itself.
    """
    coefficient = balance_coefficient(model)
    if not isinstance(loss, CausalLMLoss) or _is_own(loss):
        rule = (
            "it is added to plait.causal_lm_loss, and the loss is"
            f" {'none' if loss is None else type(loss).__name__}"
        )
        if statistics is not None and statistics.z_loss:
            raise ConfigError(
                Problem(
                    "experts.z_loss",
                    statistics.z_loss,
                    rule,
                    "pass loss_fn=plait.causal_lm_loss, or use 0",
                )
            )
        if statistics is not None and statistics.is_global:
            raise ConfigError(
                Problem(
                    "experts.balance",
                    "global",
                    rule,
                    'pass loss_fn=plait.causal_lm_loss, or use "micro_batch"',
                )
            )
        if statistics is not None and statistics.balances:
            rule = (
                "with parallel.pp or parallel.cp the balance loss is a sum over ranks, which no"
                f" output holds; {rule}"
            )
            remedy = "pass loss_fn=plait.causal_lm_loss, or use False"
            raise ConfigError(Problem("model.config.output_router_logits", True, rule, remedy))
        return loss
    if statistics is None:
        return BalancedLoss(loss, coefficient) if coefficient is not None else loss
    return BalancedLoss(loss, coefficient or 0.0 if statistics.balances else 0.0, statistics)


def without_balance_loss(loss: Any) -> Any:
    """What it was made of: what a pipeline checks, because the balance loss is sent along with the
    activations.
    """
    return loss.inner if isinstance(loss, BalancedLoss) else loss


def _is_own(loss: CausalLMLoss) -> bool:
    """Whether a subclass of a user's computes the loss itself."""
    return not type(loss).__module__.startswith("plait.losses.")
