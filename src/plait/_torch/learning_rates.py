"""Learning rates that torch's LR schedulers store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def scale_rates(scheduler: Any, ratios: Sequence[float]) -> None:
    """Multiply the learning rates that a scheduler stores, including those of inner schedulers.

    Args:
        scheduler: LR scheduler of torch, for example a `SequentialLR`.
        ratios: One factor per parameter group.
    """
    for name in ("base_lrs", "_last_lr"):
        rates = getattr(scheduler, name, None)
        if isinstance(rates, list) and len(rates) == len(ratios):
            scaled = [rate * ratio for rate, ratio in zip(rates, ratios, strict=True)]
            setattr(scheduler, name, scaled)

    for inner in getattr(scheduler, "_schedulers", ()):
        scale_rates(inner, ratios)
