"""Kept operators: what is kept is not computed again, what was overwritten is, and dropout does not drift."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from plait._torch.operators import TorchDispatchMode
from plait.errors import ConfigError
from plait.parallel.activations.selective import kept_operators, selective_contexts


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def gradients(function, inputs, keep):
    """(gradients, operators that ran in forward, operators that ran in backward)."""
    torch.manual_seed(0)
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with Calls() as forward:
        if keep is None:
            out = function(*leaves)
        else:
            out = checkpoint(
                function,
                *leaves,
                use_reentrant=False,
                context_fn=selective_contexts(kept_operators(keep)),
            )
    with Calls() as backward:
        out.sum().backward()
    return [x.grad for x in leaves], forward.counts, backward.counts


def mlp(x, a, b, c):
    return torch.sin(F.linear(torch.relu(F.linear(torch.tanh(F.linear(x, a)), b)), c))


MATRICES = [
    torch.randn(4, 5, 6, dtype=torch.float64),
    *(torch.randn(6, 6, dtype=torch.float64) for _ in range(3)),
]


@pytest.mark.parametrize(
    ("keep", "repeated"),
    [(("matmul",), 0), (("every_second_matmul",), 1), (("aten.tanh",), 3), ((), 3)],
)
def test_kept_products_are_not_repeated(keep, repeated):
    """The sine needs the third product, so all three are wanted in backward."""
    wanted, _, plain = gradients(mlp, MATRICES, None)
    found, _, backward = gradients(mlp, MATRICES, keep)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert backward["mm"] - plain["mm"] == repeated
    if keep == ("aten.tanh",):
        assert backward["tanh"] == 0


def overwriting(x, a):
    """Writes into a product through a view that autograd does not know as one (`aten._unsafe_view`)."""
    y = F.linear(x, a)
    y += x
    return torch.sin(y)


def test_a_result_that_is_written_into_is_computed_again():
    """Kept as it was when the forward ended it would be added to twice."""
    inputs = MATRICES[:2]
    wanted, _, plain = gradients(overwriting, inputs, None)
    found, _, backward = gradients(overwriting, inputs, ("matmul",))
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert backward["mm"] - plain["mm"] == 1


def test_dropout_after_a_kept_random_operator():
    """The second mask is drawn after the first, which is not drawn again."""

    def function(x):
        first = torch.bernoulli(torch.full_like(x, 0.5))
        return F.dropout(torch.sin(x * first), 0.5) * x

    x = [torch.randn(64, 8, dtype=torch.float64)]
    wanted, _, _ = gradients(function, x, None)
    found, forward, backward = gradients(function, x, ("aten.bernoulli",))
    assert torch.equal(wanted[0], found[0])
    assert forward["bernoulli"] >= 1 and backward["bernoulli"] == 0


def test_backward_twice():
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    layer = nn.Linear(6, 6).double()
    out = checkpoint(
        lambda v: torch.sin(layer(v)),
        x,
        use_reentrant=False,
        context_fn=selective_contexts(kept_operators(("matmul",))),
    )
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(out.sum(), x)[0])


@pytest.mark.parametrize("name", ["aten.no_such_operator", "matmuls", "nowhere.mm", ""])
def test_unknown_operators_are_refused(name):
    with pytest.raises(ConfigError, match=r"parallel\.recompute\.keep"):
        kept_operators((name,))
