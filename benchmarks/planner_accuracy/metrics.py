"""Measures of predictions: errors, coverage, regret of the selected layout, and fit or no fit."""

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
    is_inside = (low <= measured) & (measured <= high)
    outside = np.maximum(np.log(low / measured), 0) + np.maximum(np.log(measured / high), 0)
    return Errors(
        rows=len(size),
        median=float(np.median(size)),
        mean=float(size.mean()),
        p90=float(np.quantile(size, 0.9)),
        bias=float(np.median(signed)),
        coverage=float(is_inside.mean()),
        interval_score=float((np.log(high / low) + 20 * outside).mean()),
    )


@dataclass(frozen=True)
class Ranking:
    """Ranking in groups of runs that differ in their layout only."""

    groups: int
    top3_within_5_percent: float
    """Share of groups in which the best of the predicted top 3 is within 5 % of the best."""
    mean_regret_1: float
    """Mean of the relative time that the layout predicted best loses to the best."""
    mean_regret_3: float
    """Mean regret of the best of the predicted top 3."""
    p95_regret_3: float
    spearman: float
    """Median rank correlation."""


def _ranks(values: Array) -> Array:
    return np.argsort(np.argsort(values)).astype(float)


def ranking(groups: Sequence[tuple[Array, Array]]) -> Ranking | None:
    """Rank groups of (predicted, measured) with four layouts or more. None without such a group."""
    regrets = []
    correlations = []
    for predicted, measured in groups:
        if len(predicted) < 4:
            continue
        order = np.argsort(predicted, kind="stable")
        top = measured[order[:3]]
        regrets.append(np.array([top[0], top.min()]) / measured.min() - 1)
        correlations.append(np.corrcoef(_ranks(predicted), _ranks(measured))[0, 1])
    if not regrets:
        return None
    first, best_of_three = np.array(regrets).T
    return Ranking(
        groups=len(regrets),
        top3_within_5_percent=float((best_of_three <= 0.05).mean()),
        mean_regret_1=float(first.mean()),
        mean_regret_3=float(best_of_three.mean()),
        p95_regret_3=float(np.quantile(best_of_three, 0.95)),
        spearman=float(np.median(correlations)),
    )


@dataclass(frozen=True)
class Confusion:
    """Counts of layouts that fit, predicted and measured."""

    out_of_memory: int
    """Rows that ran out of memory."""
    called_fits: int
    """Rows that ran out of memory and were predicted to fit."""
    ran: int
    called_out_of_memory: int
    false_fits: float | None
    """Share of rows that ran out of memory and were predicted to fit."""
    false_alarms: float | None
    """Share of rows that ran and were predicted not to fit."""


def confusion(fits: NDArray[np.bool_], ran: NDArray[np.bool_]) -> Confusion:
    failed = int((~ran).sum())
    false_fits = int((fits & ~ran).sum())
    succeeded = int(ran.sum())
    false_alarms = int((~fits & ran).sum())
    return Confusion(
        failed,
        false_fits,
        succeeded,
        false_alarms,
        _share(false_fits, failed),
        _share(false_alarms, succeeded),
    )


def _share(count: int, total: int) -> float | None:
    if total == 0:
        return None
    return count / total
