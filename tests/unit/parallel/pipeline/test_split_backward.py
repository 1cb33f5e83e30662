"""A backward in two halves gives the gradients of a whole one, and tells whoever listens to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from plait.parallel.pipeline.split_backward import backward_inputs, backward_weights


class Branches(nn.Module):
    """Parameters used twice, a product of branches, a norm, one parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.gate = nn.Parameter(torch.rand(6))
        self.idle = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(self.norm(x)) * self.gate
        return x + torch.tanh(self.first(inner)) * torch.sigmoid(inner)


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    return {"x": x.grad, **{name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}}


class Again(nn.Module):
    """Computes a module again in backward, and counts how often it runs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.runs = 0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.module(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=False)


def test_a_block_recomputes_once_for_each_half() -> None:
    """Not once for each of its layers, whose weights are passes of their own."""
    block = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(4, 4), nn.Tanh())))
    model = nn.Sequential(Again(block), Again(nn.Linear(4, 4)))
    x = torch.rand(2, 4, requires_grad=True)
    half = backward_inputs([model(x)], [torch.ones(2, 4)], [x], model.parameters())
    assert [again.runs for again in model] == [2, 2]
    backward_weights(half)
    assert [again.runs for again in model] == [3, 3]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("loss", [False, True], ids=["middle", "last"])
@pytest.mark.parametrize("leaf", [False, True], ids=["first", "later"])
def test_two_halves(loss: bool, leaf: bool, recompute: bool) -> None:
    """For a stage in the middle, the last (a scalar loss), and the first (whose input needs no gradient). Gradients accumulate."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Branches(), Branches()]
    model = nn.Sequential(*(Again(block) if recompute else block for block in blocks)).double()
    x = torch.rand(3, 6, dtype=torch.float64, requires_grad=leaf)
    upstream = None if loss else torch.rand(3, 6, dtype=torch.float64)

    def output() -> torch.Tensor:
        return model(x).square().sum() if loss else model(x)

    for _ in range(2):
        torch.autograd.backward(output(), upstream)
    expected = gradients(model, x)
    x.grad = None
    model.zero_grad()
    told: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: told.append(name))  # type: ignore[misc]
    halves = [backward_inputs([output()], None if upstream is None else [upstream], [x], model.parameters()) for _ in range(2)]
    if leaf:
        torch.testing.assert_close(x.grad, expected["x"], rtol=1e-14, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters()), "the first half leaves the weights alone"
    for half in halves:
        backward_weights(half)
    found = gradients(model, x)
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None
        else:
            torch.testing.assert_close(found[name], gradient, rtol=1e-13, atol=1e-13)
    assert set(told) == {name for name, gradient in expected.items() if gradient is not None and name != "x"}
