"""Medians, quartiles and paired ratios with a bootstrap interval.

A ratio is taken inside a round, between two baselines that ran seconds apart, and only then summarised over rounds: slow drift of a
shared machine cancels, which it does not in a ratio of two medians.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a sample."""

    median: float
    low: float
    high: float
    count: int

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def spread(values: Sequence[float]) -> Spread:
    """Median, first and third quartile. Raises ValueError on an empty sample."""
    if not values:
        raise ValueError("spread of an empty sample")
    low, median, high = np.percentile(np.asarray(values, dtype=float), [25, 50, 75])
    return Spread(median=float(median), low=float(low), high=float(high), count=len(values))


@dataclass(frozen=True)
class Ratio:
    """The median of per-round ratios, with the interval that resampling the rounds gives."""

    median: float
    low: float
    high: float
    count: int

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def paired_ratio(
    above: Sequence[float | None],
    below: Sequence[float | None],
    *,
    level: float = 0.95,
    draws: int = 4000,
    seed: int = 0,
) -> Ratio | None:
    """`above[i] / below[i]` over the rounds i in which both were measured (None marks a round that was not).

    The interval is the percentile bootstrap over rounds at `level`, seeded, hence the same on every call. None without a common round.
    """
    ratios = np.array(
        [a / b for a, b in zip(above, below, strict=True) if a is not None and b is not None]
    )
    if not len(ratios):
        return None
    picks = np.random.default_rng(seed).integers(0, len(ratios), size=(draws, len(ratios)))
    medians = np.median(ratios[picks], axis=1)
    low, high = np.percentile(medians, [50 * (1 - level), 50 * (1 + level)])
    return Ratio(
        median=float(np.median(ratios)), low=float(low), high=float(high), count=len(ratios)
    )
