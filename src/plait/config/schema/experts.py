"""The section about mixture of experts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from plait.config.values.numbers import Finite
from plait.policy import Policy


class ExpertsSection(Policy):
    """Mixture of experts."""

    bias_update_rate: Annotated[Finite, Field(ge=0, le=1)] = 0.0
    """For models whose routers have a bias for every expert (DeepSeek-V3's
    `e_score_correction_bias`): how far it moves after a step, up for experts that had fewer tokens
    than the mean, down for those that had more. DeepSeek-V3 was trained with 0.001. 0: biases stay
    as they are.
    """
    balance: Literal["micro_batch", "global"] = "micro_batch"
    """What the balance loss of `model.config.output_router_logits` is of: the tokens of each
    process's micro-batch, as in Transformers, or those of the micro-batches that all data-parallel
    processes compute at the same time.
    """
    z_loss: Annotated[Finite, Field(ge=0, le=1)] = 0.0
    """Coefficient of a loss that keeps routers' logits small: the mean over tokens of the squared
    logarithm of the sum of their exponentials, summed over layers (ST-MoE, 1e-3 there). 0: none.
    """
