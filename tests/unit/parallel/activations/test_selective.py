"""Kept operators: their results are not computed again, unless they were overwritten."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from plait._torch.operators import TorchDispatchMode
from plait.errors import ConfigError
from plait.parallel.activations.selective import kept_operators, selective_contexts


class OperatorCounter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def checkpointed(function, inputs, keep):
    contexts = selective_contexts(kept_operators(keep))
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts)


def run(function, inputs, keep):
    """Return gradients, counts of operators in forward, and counts of operators in backward."""
    torch.manual_seed(0)
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with OperatorCounter() as forward:
        output = function(*leaves) if keep is None else checkpointed(function, leaves, keep)
    with OperatorCounter() as backward:
        output.sum().backward()
    return [x.grad for x in leaves], forward.counts, backward.counts


def check_gradients(function, inputs, keep):
    """Compare gradients with those without recompute.

    Returns:
        Counts of operators in forward, in backward, and in the backward without recompute.
    """
    expected, _, plain_backward = run(function, inputs, None)
    actual, forward, backward = run(function, inputs, keep)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    return forward, backward, plain_backward


def mlp(x, a, b, c):
    # The backward of the sine reads the third product.
    return torch.sin(F.linear(torch.relu(F.linear(torch.tanh(F.linear(x, a)), b)), c))


GENERATOR = torch.Generator().manual_seed(0)
INPUT = torch.randn(4, 5, 6, dtype=torch.float64, generator=GENERATOR)
MATRICES = torch.randn(3, 6, 6, dtype=torch.float64, generator=GENERATOR).unbind()


@pytest.mark.parametrize(
    ("keep", "repeated"),
    [(("matmul",), 0), (("every_second_matmul",), 1), (("aten.tanh",), 3), ((), 3)],
)
def test_kept_products_are_not_repeated(keep, repeated):
    _, backward, plain_backward = check_gradients(mlp, (INPUT, *MATRICES), keep)
    assert backward["mm"] - plain_backward["mm"] == repeated
    assert (backward["tanh"] == 0) == ("aten.tanh" in keep)


def test_a_result_that_is_written_into_is_computed_again():
    """A kept result would have the sum of the forward already, and get it twice."""

    def overwriting(x, a):
        # Autograd does not know the result of `aten._unsafe_view` as a view of the product.
        y = F.linear(x, a)
        y += x
        return torch.sin(y)

    _, backward, plain_backward = check_gradients(overwriting, (INPUT, MATRICES[0]), ("matmul",))
    assert backward["mm"] - plain_backward["mm"] == 1


def test_dropout_after_a_kept_random_operator():
    """The second mask is drawn after the first, which is not drawn again."""

    def function(x):
        first = torch.bernoulli(torch.full_like(x, 0.5))
        return F.dropout(torch.sin(x * first), 0.5) * x

    x = torch.randn(64, 8, dtype=torch.float64)
    forward, backward, _ = check_gradients(function, [x], ("aten.bernoulli",))
    assert forward["bernoulli"] >= 1
    assert backward["bernoulli"] == 0


def test_backward_twice():
    x = INPUT.clone().requires_grad_()
    output = checkpointed(mlp, (x, *MATRICES), ("matmul",))
    first = torch.autograd.grad(output.sum(), x, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(output.sum(), x)[0])


@pytest.mark.parametrize("name", ["aten.no_such_operator", "matmuls", "nowhere.mm", ""])
def test_unknown_operators_are_refused(name):
    with pytest.raises(ConfigError, match=r"parallel\.recompute\.keep"):
        kept_operators((name,))
