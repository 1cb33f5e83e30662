"""What torch's learning rate schedules keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def scale_rates(scheduler: Any, ratios: Sequence[float]) -> None:
    """Multiply the rates that a schedule keeps, and those of the schedules that it is made of; one
    ratio a parameter group.
    """
    for name in ("base_lrs", "_last_lr"):
        rates = getattr(scheduler, name, None)
        if isinstance(rates, list) and len(rates) == len(ratios):
            setattr(
                scheduler, name, [rate * ratio for rate, ratio in zip(rates, ratios, strict=True)]
            )
    for inner in getattr(scheduler, "_schedulers", ()):
        scale_rates(inner, ratios)
