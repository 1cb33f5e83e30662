"""Any two of the three batch sizes give the third, and a contradiction gets sizes that work."""

import re

import hypothesis
import pytest
from hypothesis import strategies as st

from plait.config.resolving.resolved_parts import solve_batch
from plait.errors import ConfigError

SIZES = st.integers(1, 64)
DEGREES = st.integers(1, 16)


@hypothesis.given(SIZES, SIZES, DEGREES)
def test_any_two_give_the_third(micro, accumulation, dp):
    train = micro * accumulation * dp
    expected = solve_batch(train, micro, accumulation, dp)
    assert expected.train_batch_size == train
    assert expected.micro_batch_size == micro
    assert expected.accumulation == accumulation
    assert solve_batch(train, micro, None, dp) == expected
    assert solve_batch(train, None, accumulation, dp) == expected
    assert solve_batch(None, micro, accumulation, dp) == expected


@hypothesis.given(SIZES, DEGREES)
def test_one_size_alone_means_no_accumulation(micro, dp):
    expected = solve_batch(micro * dp, micro, 1, dp)
    assert solve_batch(None, micro, None, dp) == expected
    assert solve_batch(micro * dp, None, None, dp) == expected


# A multiple of the product would pass if only the remainder were compared.
@hypothesis.example(16, 2, 2, 2)
@hypothesis.given(st.none() | st.integers(1, 200), st.none() | SIZES, st.none() | SIZES, DEGREES)
def test_the_product_holds_or_is_refused_with_a_remedy(train, micro, accumulation, dp):
    hypothesis.assume(train is not None or micro is not None)
    try:
        batch = solve_batch(train, micro, accumulation, dp)
    except ConfigError as error:
        (problem,) = error.problems
        assert problem.field == "train_batch_size"
        assert problem.value == train
        if micro is None or accumulation is None:
            check_suggestions(problem, micro, accumulation, dp)
    else:
        assert batch.train_batch_size == batch.micro_batch_size * batch.accumulation * dp
        assert train in (None, batch.train_batch_size)
        assert micro in (None, batch.micro_batch_size)
        assert accumulation in (None, batch.accumulation)


def check_suggestions(problem, micro, accumulation, dp):
    """Check that the sizes in the remedy work, and that one is as near as possible."""
    sizes = [int(number) for number in re.findall(r"\d+", problem.remedy.partition(",")[0])]
    assert sizes
    for size in sizes:
        assert size > 0
        assert solve_batch(size, micro, accumulation, dp).train_batch_size == size
    distance = min(abs(problem.value - size) for size in sizes)
    assert distance < (micro or accumulation or 1) * dp


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (32, 4, 2, 2),
            "train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x dp 2 = 16, not 32; "
            "set train_batch_size 16, or gradient_accumulation_steps 4, "
            "or train_micro_batch_size_per_gpu 8, or leave one of the three out",
        ),
        (
            (30, 4, None, 2),
            "train_batch_size = 30: micro 4 x dp 2 = 8 and 30 % 8 = 6; use 24 or 32",
        ),
        ((3, None, None, 4), "accumulation 1 x dp 4 = 4 and 3 % 4 = 3; use 4, or change"),
        ((None, None, None, 2), "neither it nor train_batch_size is given"),
        ((None, None, 4, 2), "neither it nor train_batch_size is given"),
    ],
)
def test_contradictions_name_every_change_that_works(sizes, message):
    """DeepSpeed rounds down where the sizes do not divide."""
    with pytest.raises(ConfigError) as error:
        solve_batch(*sizes)
    assert message in str(error.value)
