"""Training on real text through compressed collectives: what it costs in loss, and that error feedback is what keeps 4 bits harmless."""

from functools import cache
from statistics import mean

import pytest

from tests.parity.language import bigram_losses, losses

STEPS = 200
BIGRAM_STEPS = 150


@cache
def exact(pool):
    return mean(pool.run(2, losses, {}, 0, STEPS)[0][-40:])


@pytest.mark.proof
@pytest.mark.parametrize(
    ("stage", "parallel"),
    [
        (0, {"compress_gradients": "int8"}),
        (2, {"compress_gradients": "int8", "compress_weights": "int8"}),
    ],
    ids=["stage 0", "stage 2, weights too"],
)
def test_int8_costs_a_language_model_less_than_one_percent(pool, stage, parallel):
    """The last 40 of 200 steps, equal data."""
    found = pool.run(2, losses, parallel, stage, STEPS)[0]
    assert found[0] - mean(found[-40:]) > 2, "nothing was learnt"
    assert mean(found[-40:]) == pytest.approx(exact(pool), rel=0.01)


@pytest.mark.proof
def test_four_bits_hurt_without_error_feedback(pool):
    """Full-batch gradient descent, where a difference is no chance: at equal steps 4 bits are worse without feedback and not with it."""

    def loss(**parallel):
        return float(pool.run(2, bigram_losses, parallel, BIGRAM_STEPS)[0][-1])

    whole = loss()
    assert loss(compress_gradients="int8", error_feedback=False) == pytest.approx(whole, rel=1e-3)
    assert loss(compress_gradients="int4", error_feedback=True) == pytest.approx(whole, rel=1e-3)
    assert loss(compress_gradients="int4", error_feedback=False) > whole * 1.01
