"""Fit of the planner's constants to rows of many sources, each with an offset of its own."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from plait.planner.calibrate import Fit, LogRatios, most_probable
from plait.planner.constants import Constant, Rates


def grouped_fit(
    predict: Callable[[Rates], np.ndarray],
    measured: np.ndarray,
    names: Sequence[str],
    *,
    priors: Mapping[str, Constant],
    spread: float,
    groups: np.ndarray,
    group_width: float,
    weights: np.ndarray | float = 1.0,
    begin: Rates | None = None,
) -> tuple[Fit, np.ndarray]:
    """Fit constants that do not explain what the rows of a group have in common.

    Args:
        predict: Returns the logarithms of what was measured, one per row.
        measured: Logarithms of the measured values.
        names: Constants that may move.
        priors: Priors of all constants.
        spread: Noise of a row.
        groups: Number of the group of each row.
        group_width: Standard deviation of a group's offset.
        weights: Scale the evidence of the rows.
        begin: Constants at which the search starts (default: the priors). They save time only.

    Returns:
        The fit, and the offset of each group.
    """
    log_ratios = LogRatios(tuple(names), priors)
    size = len(names)
    count = int(groups.max()) + 1
    is_in_group = (groups[:, None] == np.arange(count)).astype(float)
    start = np.zeros(size + count)
    if begin is not None:
        start[:size] = [math.log(float(begin[name]) / priors[name].median) for name in names]

    def predict_at(theta: np.ndarray) -> np.ndarray:
        return predict(log_ratios.rates(theta)) + is_in_group @ theta[size:]

    def jacobian_at(theta: np.ndarray, predicted: np.ndarray) -> np.ndarray:
        without_offsets = predicted - is_in_group @ theta[size:]
        slopes = log_ratios.jacobian(predict, theta, without_offsets)
        return np.concatenate([slopes, is_in_group], axis=1)

    unbounded = np.full(count, math.inf)
    least, most = log_ratios.bounds
    theta, covariance = most_probable(
        predict_at,
        jacobian_at,
        measured,
        start,
        widths=np.concatenate([log_ratios.widths, np.full(count, group_width)]),
        bounds=(np.concatenate([least, -unbounded]), np.concatenate([most, unbounded])),
        spread=spread,
        weights=weights,
    )
    rates = log_ratios.rates(theta)
    fitted = Fit(log_ratios.names, rates, covariance[:size, :size], spread, len(measured))
    return fitted, theta[size:]
