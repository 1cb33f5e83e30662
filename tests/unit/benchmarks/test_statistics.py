"""Paired ratios and quartiles of measurements, and the order of turns."""

from itertools import pairwise

import hypothesis
import pytest
from hypothesis import strategies as st

from benchmarks.common.statistics import paired_ratio, spread
from benchmarks.steps.rounds import order

SECONDS = st.floats(min_value=0.01, max_value=100)


def test_a_ratio_is_taken_within_a_round():
    # The machine halves its speed in every round, and one side is always 10 % slower.
    ratio = paired_ratio([1.1, 2.2, 4.4, 8.8], [1.0, 2.0, 4.0, 8.0])
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((1.1, 1.1, 1.1))


def test_rounds_that_one_side_lacks_do_not_count():
    ratio = paired_ratio([2.0, None, 99.0], [1.0, 1.0, None])
    assert (ratio.median, ratio.count) == (2.0, 1)
    assert paired_ratio([None], [1.0]) is None


@hypothesis.given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=20))
def test_the_interval_is_repeatable_and_within_the_ratios(pairs):
    above, below = zip(*pairs, strict=True)
    ratio = paired_ratio(above, below)
    assert ratio == paired_ratio(above, below)
    ratios = [a / b for a, b in pairs]
    assert min(ratios) <= ratio.low <= ratio.high <= max(ratios)


def test_a_wider_scatter_gives_a_wider_interval():
    def width(scatter):
        ratio = paired_ratio([1 + scatter * (i % 3 - 1) for i in range(15)], [1.0] * 15)
        return ratio.high - ratio.low

    assert width(0.1) > width(0.01) > width(0.0) == 0


def test_quartiles():
    quartiles = spread([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (quartiles.low, quartiles.median, quartiles.high) == (2.0, 3.0, 4.0)
    assert quartiles.count == 5
    with pytest.raises(ValueError, match="empty"):
        spread([])


@hypothesis.given(st.integers(2, 12), st.integers(0, 40))
def test_every_baseline_has_one_turn_per_round(count, index):
    names = [str(number) for number in range(count)]
    assert sorted(order(names, index=index)) == sorted(names)


def test_baselines_do_not_always_follow_the_same_one():
    names = list("abcd")
    turns = [order(names, index=index) for index in range(8)]
    followers = set()
    for turn in turns:
        followers |= set(pairwise(turn))
    assert ("a", "b") in followers and ("b", "a") in followers
    assert {turn[0] for turn in turns} == set(names)
