"""Quartiles, and ratios within rounds with a bootstrap interval.

A ratio is taken within a round, between two baselines that ran seconds apart, and then summarised
over rounds. Slow drift of a shared machine cancels, which it does not in a ratio of two medians.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """A median with the quartiles, or with the ends of its interval."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles. Raises ValueError for an empty sample."""
    if not values:
        raise ValueError("spread of an empty sample")
    low, median, high = np.percentile(np.asarray(values, dtype=float), [25, 50, 75])
    return Spread(median=float(median), low=float(low), high=float(high), count=len(values))


def paired_ratio(
    above: Sequence[float | None],
    below: Sequence[float | None],
    *,
    level: float = 0.95,
    draws: int = 4000,
) -> Spread | None:
    """Return the median of `above[i] / below[i]` over the rounds i that both have, not None.

    The interval is the percentile bootstrap over rounds at `level`, the same on every call. The
    result is None without a common round.
    """
    pairs = zip(above, below, strict=True)
    ratios = np.array([a / b for a, b in pairs if a is not None and b is not None])
    if not len(ratios):
        return None
    picks = np.random.default_rng(0).integers(0, len(ratios), size=(draws, len(ratios)))
    medians = np.median(ratios[picks], axis=1)
    low, high = np.percentile(medians, [50 * (1 - level), 50 * (1 + level)])
    return Spread(float(np.median(ratios)), float(low), float(high), len(ratios))
