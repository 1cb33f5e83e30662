"""A backward in two halves gives the gradients of a whole one, and tells whoever listens to them."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from plait._torch.passes import allow_two_runs
from plait.parallel.pipeline.split_backward import backward_inputs, backward_weights


class Branches(nn.Module):
    """Parameters used twice, a product of branches, a norm, one parameter that is not used."""

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
    """Gradients that exist, by name."""
    tensors = {"x": x, **dict(model.named_parameters())}
    return {name: t.grad.clone() for name, t in tensors.items() if t.grad is not None}


class Again(nn.Module):
    """Computes a module again in backward, and counts how often it runs."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.runs = 0

    def run(self, x):
        self.runs += 1
        return self.module(x)

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False)


def test_a_block_recomputes_once_for_each_half():
    """A block recomputes once per half, and not once per layer, although the weights of each layer are a pass."""
    block = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(4, 4), nn.Tanh())))
    model = nn.Sequential(Again(block), Again(nn.Linear(4, 4)))
    x = torch.rand(2, 4, requires_grad=True)
    half = backward_inputs([model(x)], [torch.ones(2, 4)], [x])
    assert [again.runs for again in model] == [2, 2]
    backward_weights(half)
    assert [again.runs for again in model] == [3, 3]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("loss", [False, True], ids=["middle", "last"])
@pytest.mark.parametrize("leaf", [False, True], ids=["first", "later"])
def test_two_halves(loss, leaf, recompute):
    """The stage is in the middle, the last (a scalar loss), or the first (whose input needs no gradient). Gradients accumulate."""
    torch.manual_seed(0)
    blocks = [Branches(), Branches()]
    model = nn.Sequential(*(Again(block) if recompute else block for block in blocks)).double()
    x = torch.rand(3, 6, dtype=torch.float64, requires_grad=leaf)
    upstream = None if loss else torch.rand(3, 6, dtype=torch.float64)

    def output():
        return model(x).square().sum() if loss else model(x)

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
    # The first half has the gradients of weights that are used twice.
    early = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert early == ({name for name in notified if ".first." in name} if leaf else set())
    for half in halves:
        backward_weights(half)
    torch.testing.assert_close(gradients(model, x), expected, rtol=1e-13, atol=1e-13)
    assert set(notified) == expected.keys() - {"x"}


class ScalesInPlace(torch.autograd.Function):
    """A product whose backward changes what forward saved, as fused losses do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x_gradient, ctx.weight_factor = weight.detach().clone(), x.detach().clone()
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        ctx.weight_factor *= gradient.mean()
        return gradient @ ctx.x_gradient.t(), ctx.weight_factor.t() @ torch.ones_like(gradient)


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
    """Return an auxiliary loss of an intermediate result of parameters that the other output uses too."""
    scaled = v * 2
    return x @ scaled @ w, scaled.square().sum()


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
    """Gradients are those of one backward pass. All that can wait for the second half does."""
    failures = []
    for name, (function, first) in GRAPHS.items():
        torch.manual_seed(0)
        w, v = (torch.rand(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
        w.requires_grad_(not frozen)
        values = torch.rand(2, 3, dtype=torch.float64)
        results = []
        for split in (False, True):
            x = values.clone().requires_grad_()
            w.grad = v.grad = None
            result = function(x, w, v)
            result = result if isinstance(result, tuple) else (result,)
            outputs = [tensor for tensor in result if tensor.requires_grad]
            del result
            upstream = [torch.full_like(output, at + 2.0) for at, output in enumerate(outputs)]
            if split:
                half = backward_inputs(outputs, upstream, [x])
                del outputs
                early = {key for key, leaf in (("w", w), ("v", v)) if leaf.grad is not None}
                if early != first - ({"w"} if frozen else set()):
                    failures.append(f"{name}: {early} in the first half")
                backward_weights(half)
            else:
                torch.autograd.backward(outputs, upstream)
            leaves = {"x": x, "w": w, "v": v}
            results.append({key: t.grad for key, t in leaves.items() if t.grad is not None})
        try:
            torch.testing.assert_close(*reversed(results), rtol=1e-13, atol=1e-13)
        except AssertionError as error:
            failures.append(f"{name}: {error}")


def test_a_function_runs_once():
    """Hooks between two uses of a weight run once too."""
    w, x = torch.rand(3, 3, requires_grad=True), torch.rand(2, 3, requires_grad=True)
    runs = []
    y = (x @ w).tanh()
    y.register_hook(lambda gradient: runs.append(1))
    half = backward_inputs([y @ w], [torch.ones(2, 3)], [x])
    del y
    backward_weights(half)
    assert runs == [1]


@pytest.mark.parametrize("head", [False, True], ids=["block", "block and detached head"])
def test_a_reentrant_checkpoint(head):
    """The first half is the complete backward of its graph."""
    block, last = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    values, results = torch.rand(2, 3, dtype=torch.float64), []
    for split in (False, True):
        block.zero_grad()
        last.zero_grad()
        x = values.clone().requires_grad_()
        hidden = checkpoint(block, x, use_reentrant=True)
        outputs = [last(hidden), last(hidden.detach())] if head else [last(hidden)]
        upstream = [torch.ones_like(tensor) for tensor in outputs]
        if split:
            backward_weights(backward_inputs(outputs, upstream, [x]))
        else:
            torch.autograd.backward(outputs, upstream)
        results.append(gradients(nn.ModuleList([block, last]), x))
    torch.testing.assert_close(*reversed(results), rtol=1e-13, atol=1e-13)
