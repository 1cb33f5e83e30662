"""The rule of the ZeRO stages against their meaning, counted by hand."""

import pytest

from plait.parallel.accounting.ledger import (
    AfterBackward,
    after_block_backward,
    after_root_backward,
)

YES = True
NO = False


@pytest.mark.parametrize(
    ("zero", "earlier", "last"),
    [
        # Gradients reduced, gradients complete, gathered parameters freed.
        (0, (NO, NO, NO), (YES, YES, YES)),
        (1, (NO, NO, NO), (YES, YES, YES)),
        (2, (YES, NO, NO), (YES, YES, YES)),
        (3, (YES, NO, YES), (YES, YES, YES)),
    ],
)
def test_without_a_pipeline(zero, earlier, last):
    """Stages 0 and 1 reduce once per step, 2 and 3 once per micro-batch."""
    for remaining, expected in ((3, earlier), (2, earlier), (1, last)):
        of_block = after_block_backward(zero, {0: remaining}, ran=0, block_stage=0)
        of_root = after_root_backward(zero, {0: remaining}, ran=0, users={0})
        assert of_block == of_root == expected


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_stages_of_a_rank_end_at_different_times(zero):
    """The root's gradients are complete after the last backward of all stages that use it."""
    remaining = {0: 1, 3: 2}
    continues = AfterBackward(zero >= 2, NO, zero == 3)
    assert after_block_backward(zero, remaining, ran=0, block_stage=0) == (YES, YES, YES)
    # A backward of stage 0 changes nothing for the blocks of stage 3.
    assert after_block_backward(zero, remaining, ran=0, block_stage=3) == (NO, NO, NO)
    assert after_block_backward(zero, remaining, ran=3, block_stage=3) == continues
    assert after_root_backward(zero, remaining, ran=0, users={0, 3}) == continues
    assert after_root_backward(zero, {0: 0, 3: 1}, ran=3, users={0, 3}) == (YES, YES, YES)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_root_that_only_some_stages_use(zero):
    """Only the stage with the embedding reduces the root, but every stage of the rank holds it."""
    for remaining, ran, expected in (
        ({0: 2, 2: 1}, 2, AfterBackward(NO, NO, zero == 3)),
        # Stage 0 has ended, but stage 2 still needs the gathered parameters below ZeRO 3.
        ({0: 1, 2: 1}, 0, AfterBackward(YES, YES, zero == 3)),
        ({0: 0, 2: 1}, 2, AfterBackward(NO, NO, YES)),
    ):
        assert after_root_backward(zero, remaining, ran=ran, users={0}) == expected
