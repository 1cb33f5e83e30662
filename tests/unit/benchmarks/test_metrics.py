import numpy as np
import pytest

from benchmarks.planner_accuracy.metrics import confusion, errors, ranking


def test_errors_by_hand():
    found = errors(
        np.array([1.1, 0.8, 1.0]), np.ones(3), np.array([1.05, 0.7, 0.9]), np.array([1.2, 0.9, 1.1])
    )
    assert found.rows == 3
    assert found.median == pytest.approx(0.1) and found.mean == pytest.approx(0.1)
    assert found.bias == pytest.approx(0.0)
    assert found.coverage == pytest.approx(1 / 3)
    widths = np.log([1.2 / 1.05, 0.9 / 0.7, 1.1 / 0.9])
    assert found.interval_score == pytest.approx(
        (widths.sum() + 20 * (np.log(1.05) - np.log(0.9))) / 3
    )


def test_no_rows_have_no_errors():
    with pytest.raises(ValueError, match="no rows"):
        errors(*(np.array([]),) * 4)


def test_regret_of_the_chosen():
    measured = np.array([1.0, 1.02, 2.0, 3.0, 4.0])
    right, wrong = (measured, measured), (measured[::-1].copy(), measured)
    found = ranking([right, wrong, (np.ones(2), np.ones(2))])  # the last is too small a group
    assert found.groups == 2
    assert found.top3_within_5_percent == 0.5
    assert found.mean_regret_1 == pytest.approx((0 + 3) / 2)
    assert found.mean_regret_3 == pytest.approx((0 + 1) / 2)
    assert found.spearman == pytest.approx(0)
    assert ranking([]) is None


def test_fit_and_no_fit():
    found = confusion(np.array([True, True, False, False]), np.array([True, False, True, False]))
    assert (found.out_of_memory, found.called_fits, found.ran, found.called_out_of_memory) == (
        2,
        1,
        2,
        1,
    )
    assert found.false_fits == found.false_alarms == 0.5
    assert confusion(np.array([True]), np.array([True])).false_fits is None
