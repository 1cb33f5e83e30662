"""Metrics of the accuracy report, compared with values by hand."""

import numpy as np
import pytest

from benchmarks.planner_accuracy.metrics import confusion, errors, ranking


def test_errors_by_hand():
    low = np.array([1.05, 0.7, 0.9])
    high = np.array([1.2, 0.9, 1.1])
    result = errors(np.array([1.1, 0.8, 1.0]), np.ones(3), low, high)
    assert result.rows == 3
    assert result.median == pytest.approx(0.1) and result.mean == pytest.approx(0.1)
    assert result.bias == pytest.approx(0.0)
    assert result.coverage == pytest.approx(1 / 3)
    # The width of an interval, and 20 times the distance of a value outside.
    score = np.log(high / low).sum() + 20 * (np.log(1.05) - np.log(0.9))
    assert result.interval_score == pytest.approx(score / 3)


def test_no_rows_have_no_errors():
    with pytest.raises(ValueError, match="no rows"):
        errors(*(np.array([]),) * 4)


def test_regret_of_the_fastest_predictions():
    measured = np.array([1.0, 1.02, 2.0, 3.0, 4.0])
    right = (measured, measured)
    wrong = (measured[::-1].copy(), measured)
    too_small = (np.ones(2), np.ones(2))
    result = ranking([right, wrong, too_small])
    assert result.groups == 2
    assert result.top3_within_5_percent == 0.5
    assert result.mean_regret_1 == pytest.approx((0 + 3) / 2)
    assert result.mean_regret_3 == pytest.approx((0 + 1) / 2)
    assert result.spearman == pytest.approx(0)
    assert ranking([]) is None


def test_fit_and_no_fit():
    result = confusion(np.array([True, True, False, False]), np.array([True, False, True, False]))
    assert (result.out_of_memory, result.ran) == (2, 2)
    assert (result.called_fits, result.called_out_of_memory) == (1, 1)
    assert result.false_fits == result.false_alarms == 0.5
    assert confusion(np.array([True]), np.array([True])).false_fits is None
