"""Label smoothing of a sharded model.

Transformers' Trainer decides by the name of a model's class whether labels are those of the next
token. Sharding changes the class, so the decision is made for the class before sharding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from plait.sharded.saved_folders import class_before_sharding


@dataclass(frozen=True)
class Smoothing:
    """Replacement of a Trainer's `label_smoother`.

    Attributes:
        smoother: Transformers' LabelSmoother.
        shifts: Whether a label is the token after its position.
    """

    smoother: Any
    shifts: bool

    def __call__(
        self, output: Any, labels: torch.Tensor, shift_labels: bool = False, **more: Any
    ) -> torch.Tensor:
        loss: torch.Tensor = self.smoother(output, labels, shift_labels=self.shifts, **more)
        return loss


def smoothing_of(smoother: Any, model: Any) -> Smoothing:
    """Return the label smoothing for a model.

    Args:
        smoother: Transformers' LabelSmoother, or the result of an earlier call.
        model: The model, sharded or not, with or without adapters.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    base = model
    if hasattr(model, "peft_config") and hasattr(model, "base_model"):
        base = model.base_model.model
    kind = class_before_sharding(type(base))
    shifts = kind.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return Smoothing(getattr(smoother, "smoother", smoother), shifts)
