"""The rule of the ZeRO stages against their meaning, counted by hand."""

import pytest

from plait.parallel.accounting.ledger import (
    AfterBackward,
    after_block_backward,
    after_root_backward,
)

YES, NO = True, False


@pytest.mark.parametrize(
    ("zero", "earlier", "last"),
    [
        # Gradients reduced, complete, gathered parameters freed.
        (0, (NO, NO, NO), (YES, YES, YES)),
        (1, (NO, NO, NO), (YES, YES, YES)),
        (2, (YES, NO, NO), (YES, YES, YES)),
        (3, (YES, NO, YES), (YES, YES, YES)),
    ],
)
def test_without_a_pipeline(zero, earlier, last):
    """One reduction a step at stages 0 and 1, one a micro-batch at 2 and 3; parameters freed in between at 3. The root unit likewise."""
    for left, expected in ((3, earlier), (2, earlier), (1, last)):
        assert (
            after_block_backward(zero, {0: left}, ran=0, block_stage=0)
            == after_root_backward(zero, {0: left}, ran=0, users={0})
            == expected
        )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_stages_of_a_rank_end_at_different_times(zero):
    """Stage 0 ends its step before stage 3, which has the head: the root's gradients are complete with the last backward of both."""
    assert after_block_backward(zero, {0: 1, 3: 2}, ran=0, block_stage=0) == (YES, YES, YES)
    assert after_block_backward(zero, {0: 1, 3: 2}, ran=0, block_stage=3) == (NO, NO, NO), (
        "another stage has run"
    )
    assert after_block_backward(zero, {0: 1, 3: 2}, ran=3, block_stage=3) == AfterBackward(
        zero >= 2, NO, zero == 3
    )
    assert after_root_backward(zero, {0: 1, 3: 2}, ran=0, users={0, 3}) == AfterBackward(
        zero >= 2, NO, zero == 3
    )
    assert after_root_backward(zero, {0: 0, 3: 1}, ran=3, users={0, 3}) == (YES, YES, YES)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_root_that_only_some_stages_use(zero):
    """On a rank with the embedding and stages in the middle: only the first stage's backward reduces it, and every stage holds it."""
    assert after_root_backward(zero, {0: 2, 2: 1}, ran=2, users={0}) == AfterBackward(
        NO, NO, zero == 3
    )
    assert after_root_backward(zero, {0: 1, 2: 1}, ran=0, users={0}) == AfterBackward(
        YES, YES, zero == 3
    ), "another stage goes on with it"
    assert after_root_backward(zero, {0: 0, 2: 1}, ran=2, users={0}) == AfterBackward(NO, NO, YES)
