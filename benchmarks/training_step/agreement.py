"""Whether all baselines trained: their losses and gradient norms at the same step index, against the reference's.

The loss of the first step shows equal weights, data and forward; the loss of the second shows equal updates; the norm shows that
gradients are means, whole, and taken before clipping. Different orders of addition in float32 drift apart slowly, hence two bars.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from benchmarks.training_step.rounds import Record

EARLY_STEPS = 4
EARLY_LOSS = 1e-4
"""Largest difference of the loss in the first steps, where only rounding can differ."""
LATE_LOSS = 3e-2
"""Largest difference of the loss in any step."""
EARLY_NORM = 1e-3
"""Largest relative difference of the gradient norm in the first steps."""


@dataclass(frozen=True)
class Agreement:
    """One baseline against the reference."""

    steps: int
    """Steps that both did."""
    early_loss: float
    late_loss: float
    early_norm: float

    @property
    def holds(self) -> bool:
        """Whether every difference is below its bar."""
        return (
            self.steps > 0
            and self.early_loss <= EARLY_LOSS
            and self.late_loss <= LATE_LOSS
            and self.early_norm <= EARLY_NORM
        )

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "holds": self.holds}


def compare(record: Record, reference: Record) -> Agreement:
    """Largest differences over the steps that both did; infinite where a loss is not a number."""
    steps = min(len(record.losses), len(reference.losses))
    losses = [
        _distance(a, b)
        for a, b in zip(record.losses[:steps], reference.losses[:steps], strict=True)
    ]
    pairs = zip(record.norms[:EARLY_STEPS], reference.norms[:EARLY_STEPS], strict=False)
    norms = [_distance(a, b) / b for a, b in pairs if a is not None and b]
    return Agreement(
        steps=steps,
        early_loss=max(losses[:EARLY_STEPS], default=0.0),
        late_loss=max(losses, default=0.0),
        early_norm=max(norms, default=0.0),
    )


def _distance(a: float, b: float) -> float:
    difference = abs(a - b)
    return float("inf") if math.isnan(difference) else difference


def check(records: Mapping[str, Record], *, reference: str) -> dict[str, Agreement]:
    """Every baseline that ran, against the reference."""
    return {
        name: compare(record, records[reference])
        for name, record in records.items()
        if record.losses
    }
