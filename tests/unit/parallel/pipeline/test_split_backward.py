"""A backward in two halves gives the gradients of one pass, and runs each hook once."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from plait._torch.passes import allow_two_runs
from plait.parallel.pipeline.split_backward import backward_inputs, backward_weights
from tests.table import check_rows


class Branches(nn.Module):
    """Block with a layer that is used twice, a product of branches, and an unused layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.gate = nn.Parameter(torch.rand(6))
        self.idle = nn.Linear(6, 6)

    def forward(self, x):
        inner = self.first(self.norm(x)) * self.gate
        return x + torch.tanh(self.first(inner)) * torch.sigmoid(inner)


def gradients(model, x):
    """Return all gradients that exist, by name."""
    tensors = {"x": x, **dict(model.named_parameters())}
    return {name: t.grad.clone() for name, t in tensors.items() if t.grad is not None}


class Recomputed(nn.Module):
    """Module that is computed again in backward, and counts how often it runs."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.runs = 0

    def run(self, x):
        self.runs += 1
        return self.module(x)

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False)


def test_a_block_recomputes_once_per_half():
    """It does not recompute once per layer, although the weights of each layer are one pass."""
    block = nn.Sequential()
    for _ in range(5):
        block.extend([nn.Linear(4, 4), nn.Tanh()])
    model = nn.Sequential(Recomputed(block), Recomputed(nn.Linear(4, 4)))
    x = torch.rand(2, 4, requires_grad=True)
    half = backward_inputs([model(x)], [torch.ones(2, 4)], [x])
    assert [recomputed.runs for recomputed in model] == [2, 2]
    backward_weights(half)
    assert [recomputed.runs for recomputed in model] == [3, 3]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("loss", [False, True], ids=["middle", "last"])
@pytest.mark.parametrize("leaf", [False, True], ids=["first", "later"])
def test_two_halves(loss, leaf, recompute):
    """The last stage has a scalar loss. The input of the first stage needs no gradient."""
    torch.manual_seed(0)
    blocks = [Branches(), Branches()]
    if recompute:
        blocks = map(Recomputed, blocks)
    model = nn.Sequential(*blocks).double()
    x = torch.rand(3, 6, dtype=torch.float64, requires_grad=leaf)
    upstream = None if loss else torch.rand(3, 6, dtype=torch.float64)

    def output():
        return model(x).square().sum() if loss else model(x)

    # Gradients of two micro-batches accumulate.
    for _ in range(2):
        torch.autograd.backward(output(), upstream)
    expected = gradients(model, x)

    x.grad = None
    model.zero_grad()
    notified = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: notified.append(name))
    upstreams = None if upstream is None else [upstream]
    halves = [backward_inputs([output()], upstreams, [x]) for _ in range(2)]
    if leaf:
        torch.testing.assert_close(x.grad, expected["x"], rtol=1e-14, atol=0)
    # The first half computes the gradients of weights that are used twice, if it has to compute
    # the gradient of the input.
    early = gradients(model, x).keys() - {"x"}
    assert early == {name for name in notified if ".first." in name}
    assert bool(early) == leaf

    for half in halves:
        backward_weights(half)
    torch.testing.assert_close(gradients(model, x), expected, rtol=1e-13, atol=1e-13)
    assert set(notified) == expected.keys() - {"x"}


class ScalesInPlace(torch.autograd.Function):
    """A product whose backward changes what forward saved, as fused losses do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight.detach().clone()
        ctx.x = x.detach().clone()
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        ctx.x *= gradient.mean()
        return gradient @ ctx.weight.t(), ctx.x.t() @ torch.ones_like(gradient)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        allow_two_runs(ctx)
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


def hooked(x, w, v):
    """Scale the gradient of an activation with a hook."""
    y = x @ w
    y.register_hook(lambda gradient: gradient * 0.5)
    return y.tanh() @ v


def shared_branch(x, w, v):
    """Return an output, and a loss of the factor of the weight that the output uses."""
    scaled = v * 2
    return x @ scaled @ w, scaled.square().sum()


# Functions of an input and two weights, and the weights whose gradient the first half computes.
GRAPHS = {
    "product": (lambda x, w, v: (x @ w).tanh() @ v, set()),
    "detached": (lambda x, w, v: (x.detach() @ w).tanh() @ v, set()),
    "detached branch": (lambda x, w, v: (x @ w, x.detach() @ v), set()),
    "detached and joined": (lambda x, w, v: x @ w + x.detach() @ v, set()),
    "auxiliary loss of a weight": (lambda x, w, v: (x @ w, v.square().sum()), set()),
    "auxiliary loss of the product's weight": (
        lambda x, w, v: (x @ w @ v, w.square().sum()),
        set(),
    ),
    "shared branch": (shared_branch, set()),
    "two outputs of one node": (lambda x, w, v: (x @ w @ v).split(1), set()),
    "twice in a row": (lambda x, w, v: (x @ w).tanh() @ w @ v, {"w"}),
    "twice, one behind a detach": (lambda x, w, v: ((x @ w).tanh() @ v, x.detach() @ w), set()),
    "rows of a weight": (lambda x, w, v: (x @ w) * v[0] + (x @ w.t().contiguous()) * v[1], set()),
    "view of a weight": (lambda x, w, v: x @ w.view(-1)[:9].view(3, 3).t() @ v, set()),
    "hook on an activation": (hooked, set()),
    "a Function that may run twice": (lambda x, w, v: Product.apply(Product.apply(x, w), v), set()),
    "a Function that must run once": (lambda x, w, v: ScalesInPlace.apply(x, w) @ v, {"w"}),
    "a Function at the end": (lambda x, w, v: ScalesInPlace.apply(x @ w, v), {"v"}),
    "input returned": (lambda x, w, v: (x, x @ w @ v), set()),
    "view as output": (lambda x, w, v: (x @ w @ v).view(-1), set()),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_graphs(frozen):
    """Gradients are those of one pass. All that can wait for the second half does."""

    def outputs_of(function, leaves):
        """Return the outputs with a gradient, and their gradients."""
        results = function(*leaves.values())
        if not isinstance(results, tuple):
            results = (results,)
        outputs = [tensor for tensor in results if tensor.requires_grad]
        return outputs, [torch.full_like(output, n + 2.0) for n, output in enumerate(outputs)]

    def present(leaves):
        return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    def check(row):
        function, early = row
        torch.manual_seed(0)
        values = {"x": (2, 3), "w": (3, 3), "v": (3, 3)}
        leaves = {
            name: torch.rand(shape, dtype=torch.float64, requires_grad=name != "w" or not frozen)
            for name, shape in values.items()
        }
        torch.autograd.backward(*outputs_of(function, leaves))
        expected = present(leaves)

        for leaf in leaves.values():
            leaf.grad = None
        # No reference to the outputs may stay: the caller does not keep the graph either.
        half = backward_inputs(*outputs_of(function, leaves), [leaves["x"]])
        trained = {name for name, leaf in leaves.items() if leaf.requires_grad}
        assert present(leaves).keys() - {"x"} == early & trained
        backward_weights(half)
        torch.testing.assert_close(present(leaves), expected, rtol=1e-13, atol=1e-13)

    check_rows(GRAPHS, check)


def test_a_hook_between_two_uses_of_a_weight_runs_once():
    w = torch.rand(3, 3, requires_grad=True)
    x = torch.rand(2, 3, requires_grad=True)
    runs = []
    y = (x @ w).tanh()
    y.register_hook(lambda gradient: runs.append(1))
    half = backward_inputs([y @ w], [torch.ones(2, 3)], [x])
    del y
    backward_weights(half)
    assert runs == [1]


@pytest.mark.parametrize("detached", [False, True], ids=["block", "block and detached head"])
def test_a_reentrant_checkpoint(detached):
    """The first half is the complete backward of its graph."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    block, head = model
    x = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)

    def outputs():
        hidden = checkpoint(block, x, use_reentrant=True)
        heads = [head(hidden), head(hidden.detach())] if detached else [head(hidden)]
        return heads, [torch.ones_like(output) for output in heads]

    torch.autograd.backward(*outputs())
    expected = gradients(model, x)
    model.zero_grad()
    x.grad = None
    backward_weights(backward_inputs(*outputs(), [x]))
    torch.testing.assert_close(gradients(model, x), expected, rtol=1e-13, atol=1e-13)
