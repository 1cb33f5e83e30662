"""Compressed gradients train on real text almost like uncompressed ones.

Gradients of 4 bits need error feedback for it.
"""

from functools import cache
from statistics import mean

import pytest

from tests.parity.language import bigram_losses, losses

STEPS = 200
BIGRAM_STEPS = 150


def last_loss(history):
    return mean(history[-40:])


@cache
def uncompressed_loss(pool):
    return last_loss(pool.run(2, losses, {}, 0, STEPS)[0])


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
    history = pool.run(2, losses, parallel, stage, STEPS)[0]
    # The model has learnt something.
    assert history[0] - last_loss(history) > 2
    assert last_loss(history) == pytest.approx(uncompressed_loss(pool), rel=0.01)


@pytest.mark.proof
def test_four_bits_hurt_without_error_feedback(pool):
    """Gradient descent on the full batch of a convex problem leaves nothing to chance."""

    def loss(**parallel):
        return float(pool.run(2, bigram_losses, parallel, BIGRAM_STEPS)[0][-1])

    exact = pytest.approx(loss(), rel=1e-3)
    assert loss(compress_gradients="int8", error_feedback=False) == exact
    assert loss(compress_gradients="int4", error_feedback=True) == exact
    assert loss(compress_gradients="int4", error_feedback=False) > exact.expected * 1.01
