"""Measures of predictions: errors, coverage, regret of the selected layout, and fit or no fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Errors:
    """Errors: predicted / measured - 1."""

    rows: int
    median: float
    """Median of absolute errors. Mean and p90 are of absolute errors too."""
    mean: float
    p90: float
    bias: float
    """Median of signed errors."""
    coverage: float
    """Share of rows whose measurement lies in the interval."""
    interval_score: float
    """Mean width of the 90 % interval in logarithms, plus 20 times the distance of measurements
    outside it (Gneiting and Raftery 2007, equation 43)."""


def errors(predicted: Array, measured: Array, low: Array, high: Array) -> Errors:
    """Return the errors of predictions with their intervals. Raises ValueError for no rows."""
    if len(predicted) == 0:
        raise ValueError("no rows")
    signed = predicted / measured - 1
    size = np.abs(signed)
    inside = (low <= measured) & (measured <= high)
    outside = np.maximum(np.log(low / measured), 0) + np.maximum(np.log(measured / high), 0)
    score = np.log(high / low) + 20 * outside
    told = (
        np.median(size),
        size.mean(),
        np.quantile(size, 0.9),
        np.median(signed),
        inside.mean(),
        score.mean(),
    )
    return Errors(len(size), *(float(x) for x in told))


@dataclass(frozen=True)
class Ranking:
    """Ranking in groups of runs that differ in their layout only."""

    groups: int
    top3_within_5_percent: float
    """Share of groups in which the best of the predicted top 3 is within 5 % of the best."""
    mean_regret_1: float
    """Mean of the relative time that the layout predicted best loses to the best."""
    mean_regret_3: float
    """The same for the best of the predicted top 3."""
    p95_regret_3: float
    spearman: float
    """Median rank correlation."""


def ranking(groups: Sequence[tuple[Array, Array]]) -> Ranking | None:
    """Rank groups of (predicted, measured) with at least four layouts. None without such a group."""
    first, third, correlations = [], [], []
    for predicted, measured in groups:
        if len(predicted) < 4:
            continue
        order = np.argsort(predicted, kind="stable")
        best = measured.min()
        first.append(measured[order[0]] / best - 1)
        third.append(measured[order[:3]].min() / best - 1)
        correlations.append(_correlation(predicted, measured))
    if not first:
        return None
    three = np.array(third)
    return Ranking(
        len(first),
        float((three <= 0.05).mean()),
        float(np.mean(first)),
        float(three.mean()),
        float(np.quantile(three, 0.95)),
        float(np.median(correlations)),
    )


def _correlation(a: Array, b: Array) -> float:
    ranks = [np.argsort(np.argsort(x)).astype(float) for x in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


@dataclass(frozen=True)
class Confusion:
    """Counts of layouts that fit, predicted and measured."""

    out_of_memory: int
    """Rows that ran out of memory."""
    called_fits: int
    """Of those, how many were predicted to fit."""
    ran: int
    called_out_of_memory: int

    @property
    def false_fits(self) -> float | None:
        """Share of rows that ran out of memory and were predicted to fit."""
        return self.called_fits / self.out_of_memory if self.out_of_memory else None

    @property
    def false_alarms(self) -> float | None:
        """Share of rows that ran and were predicted not to fit."""
        return self.called_out_of_memory / self.ran if self.ran else None


def confusion(fits: NDArray[np.bool_], ran: NDArray[np.bool_]) -> Confusion:
    """Count predictions and outcomes."""
    return Confusion(
        int((~ran).sum()), int((fits & ~ran).sum()), int(ran.sum()), int((~fits & ran).sum())
    )
