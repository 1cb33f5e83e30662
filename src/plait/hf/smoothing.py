"""Label smoothing of a sharded model: Transformers' Trainer tells by the name of a model's class
whether labels are those of the next token, and sharding gives a model another class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from plait.sharded.saved_folders import class_before_sharding


@dataclass(frozen=True)
class Smoothing:
    """In the place of a Trainer's `label_smoother`."""

    own: Any
    """Transformers' LabelSmoother."""
    shifts: bool
    """A label is the token after its place."""

    def __call__(
        self, output: Any, labels: torch.Tensor, shift_labels: bool = False, **more: Any
    ) -> torch.Tensor:
        loss: torch.Tensor = self.own(output, labels, shift_labels=self.shifts, **more)
        return loss


def smoothing_of(own: Any, model: Any) -> Smoothing:
    """`own` as it is for the class that `model` had before it was sharded, or that its adapters are
    on.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    base = (
        model.base_model.model
        if hasattr(model, "peft_config") and hasattr(model, "base_model")
        else model
    )
    kind = class_before_sharding(type(base))
    return Smoothing(
        getattr(own, "own", own), kind.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    )
