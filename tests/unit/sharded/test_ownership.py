"""What a replicated model is when its engine is closed: the user's, as it was but for its weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import plait


def noted(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as libraries use them."""

    @functools.wraps(forward)
    def wrapper(self: Any, x: torch.Tensor) -> Any:
        self.calls += 1
        return forward(self, x)

    return wrapper


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.calls = nn.Linear(4, 4), 0

    @noted
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.line(x).tanh()


def test_recomputed_blocks_get_their_own_forward_back() -> None:
    """With the decorators that it had: only what recompute put in its place is taken off."""
    model = nn.Sequential(*(Block() for _ in range(3)))
    data = torch.randn(2, 4)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "parallel": {"recompute": {"mode": "full"}, "blocks": ["0", "1", "2"]},
    }
    engine = plait.initialize(
        model, config, loss_fn=plait.per_sample(lambda out, batch: out.square().sum())
    )
    assert all("forward" in vars(block) for block in model)
    engine.close()
    before = [block.calls for block in model]
    assert model(data).shape == data.shape
    assert [block.calls for block in model] == [count + 1 for count in before]
