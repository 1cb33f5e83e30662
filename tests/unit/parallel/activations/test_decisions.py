"""A recomputation takes the decisions of its forward, in order, with several calls in flight."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from plait._torch.passes import graph_task
from plait.parallel.activations import selective
from plait.parallel.activations.selective import decide_once


class Block:
    """Sorts its input twice, in orders that it decides, and counts its decisions."""

    def __init__(self):
        self.decisions = 0

    def __call__(self, x):
        return (self.sorted(self.sorted(x)).sin() * x).sum()

    def sorted(self, x):
        """Take the values in the order of a decision, then sort them by value."""
        order = decide_once(lambda: self.decide(x))
        squares = torch.arange(1.0, 1 + len(x), dtype=x.dtype) ** 2
        return x.index_select(0, order).sort().values * squares

    def decide(self, x):
        self.decisions += 1
        return x.detach().cos().sort().indices


@pytest.mark.parametrize("keep", [None, ("aten.sort",), ("aten.sort", "aten.cos")])
def test_recomputation_in_another_order_decides_nothing(keep):
    """Kept operators may be called by the decision only, as the cosine is here."""
    contexts = None
    if keep is not None:
        contexts = selective.selective_contexts(selective.kept_operators(keep))
    context_fn = selective.recording_contexts(contexts)
    block = Block()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 7, dtype=torch.float64, generator=generator).requires_grad_().unbind()
    expected = [torch.autograd.grad(block(x), x)[0] for x in inputs]

    block.decisions = 0
    outputs = [checkpoint(block, x, use_reentrant=False, context_fn=context_fn) for x in inputs]
    assert block.decisions == 6
    for index, retain in ((1, True), (2, False), (0, False), (1, False)):
        (gradient,) = torch.autograd.grad(outputs[index], inputs[index], retain_graph=retain)
        torch.testing.assert_close(gradient, expected[index], rtol=0, atol=0)
    assert block.decisions == 6
    assert decide_once(lambda: "outside of a block") == "outside of a block"


def test_a_recomputation_can_be_repeated_after_an_error():
    failures = [ValueError("in the block")]

    def run(x):
        order = decide_once(lambda: x.detach().sort().indices)
        # graph_task() is None in the forward, so only the first recomputation fails.
        if failures and graph_task() is not None:
            raise failures.pop()
        return x[order].sin().cos().sum()

    x = torch.randn(3, requires_grad=True)
    output = checkpoint(run, x, use_reentrant=False, context_fn=selective.recording_contexts(None))
    with pytest.raises(ValueError, match="in the block"):
        output.backward(retain_graph=True)
    assert decide_once(lambda: "outside of a block") == "outside of a block"
    output.backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(x.sin().cos().sum(), x)[0])
