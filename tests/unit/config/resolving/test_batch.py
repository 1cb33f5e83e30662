"""The batch triangle: any two give the third, contradictions are told with numbers that work, and the suggestions do work."""

import re

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from plait.config.resolving.resolved_parts import solve_batch
from plait.errors import ConfigError

size = st.integers(1, 64)
dps = st.integers(1, 16)


@given(size, size, dps)
def test_any_two_give_the_third(micro, accumulation, dp):
    train = micro * accumulation * dp
    given_values = (
        (train, micro, accumulation),
        (train, micro, None),
        (train, None, accumulation),
        (None, micro, accumulation),
    )
    for values in given_values:
        batch = solve_batch(*values, dp)
        found = (batch.train_batch_size, batch.micro_batch_size, batch.accumulation)
        assert found == (train, micro, accumulation)


@given(size, dps)
def test_one_alone_means_no_accumulation(micro, dp):
    assert (
        solve_batch(None, micro, None, dp)
        == solve_batch(micro * dp, None, None, dp)
        == solve_batch(micro * dp, micro, 1, dp)
    )


# A multiple of the product would pass where only the remainder is compared.
@example(16, 2, 2, 2)
@given(st.none() | st.integers(1, 200), st.none() | size, st.none() | size, dps)
def test_the_product_holds_or_is_refused_with_a_remedy(train, micro, accumulation, dp):
    assume(train is not None or micro is not None)
    try:
        batch = solve_batch(train, micro, accumulation, dp)
    except ConfigError as error:
        (problem,) = error.problems
        assert problem.field == "train_batch_size"
        assert problem.value == train
        if train is not None and (micro is None or accumulation is None):
            works = [int(n) for n in re.findall(r"\d+", problem.remedy.partition(",")[0])]
            assert works
            for suggested in works:
                assert suggested > 0
                assert solve_batch(suggested, micro, accumulation, dp).train_batch_size == suggested
            assert min(abs(train - n) for n in works) < (micro or accumulation or 1) * dp
    else:
        assert batch.train_batch_size == batch.micro_batch_size * batch.accumulation * dp
        assert train in (None, batch.train_batch_size)
        assert micro in (None, batch.micro_batch_size)
        assert accumulation in (None, batch.accumulation)


def test_a_contradiction_names_every_change_that_works():
    with pytest.raises(ConfigError) as error:
        solve_batch(32, 4, 2, 2)
    assert str(error.value) == (
        "train_batch_size = 32: train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x dp 2 = 16, not 32; "
        "set train_batch_size 16, or gradient_accumulation_steps 4, or train_micro_batch_size_per_gpu 8, or leave one of the three out"
    )


def test_deepspeed_rounds_down_where_this_refuses():
    words = r"train_batch_size = 30: micro 4 x dp 2 = 8 and 30 % 8 = 6; use 24 or 32"
    with pytest.raises(ConfigError, match=words):
        solve_batch(30, 4, None, 2)
    words = r"train_batch_size = 3: accumulation 1 x dp 4 = 4 and 3 % 4 = 3; use 4, or change"
    with pytest.raises(ConfigError, match=words):
        solve_batch(3, None, None, 4)


@pytest.mark.parametrize("accumulation", [None, 4])
def test_none_given_says_which_to_give(accumulation):
    words = r"neither it nor train_batch_size is given.*set one of the two"
    with pytest.raises(ConfigError, match=words):
        solve_batch(None, None, accumulation, 2)
