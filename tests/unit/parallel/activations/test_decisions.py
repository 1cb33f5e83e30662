"""What a forward decided is what its recomputation takes: in order, for calls in flight at the same time, and beside kept operators."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from plait._torch.passes import graph_task
from plait.parallel.activations import selective
from plait.parallel.activations.selective import decide_once


class Block:
    """Sorts its input twice by orders that it decides, and notes how often it decided."""

    def __init__(self):
        self.decided = 0

    def __call__(self, x):
        return (self.sorted(self.sorted(x)).sin() * x).sum()

    def sorted(self, x):
        """In the order that is decided, and then by value."""
        order = decide_once(lambda: self.decide(x))
        return (
            x.index_select(0, order).sort().values
            * torch.arange(1.0, 1 + len(x), dtype=x.dtype) ** 2
        )

    def decide(self, x):
        self.decided += 1
        return x.detach().cos().sort().indices


@pytest.mark.parametrize("keep", [None, ("aten.sort",), ("aten.sort", "aten.cos")])
def test_calls_in_flight(keep):
    """Three calls are recomputed in another order, one of them twice; kept operators that only the decision calls are not missed."""
    block = Block()
    context_fn = selective.recording_contexts(
        None if keep is None else selective.selective_contexts(selective.kept_operators(keep))
    )
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(7, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)
    ]
    expected = [torch.autograd.grad(block(x), x)[0] for x in inputs]
    block.decided = 0

    outputs = [checkpoint(block, x, use_reentrant=False, context_fn=context_fn) for x in inputs]
    assert block.decided == 6
    for index, retain in ((1, True), (2, False), (0, False), (1, False)):
        (found,) = torch.autograd.grad(outputs[index], inputs[index], retain_graph=retain)
        torch.testing.assert_close(found, expected[index], rtol=0, atol=0)
    assert block.decided == 6, "no recomputation decides again"
    assert decide_once(lambda: "outside of a block") == "outside of a block"


def test_an_error_leaves_nothing_behind():
    """A block that fails in its recomputation may be recomputed again."""
    failures = [ValueError("in the block")]

    def run(x):
        order = decide_once(lambda: x.detach().sort().indices)
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
