"""How far Muon's updates are apart where gradients differ by rounding: what its docstring says of two layouts."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def update(gradient: torch.Tensor) -> torch.Tensor:
    """Of a matrix, by one step of learning rate 1."""
    parameter = nn.Parameter(torch.zeros_like(gradient, dtype=torch.float32))
    parameter.grad = gradient.float()
    torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return parameter.detach().double()


@pytest.mark.parametrize(("rank", "least", "most"), [(64, 2e-3, 2e-2), (4, 2e-2, 1e-1)])
def test_of_full_and_of_low_rank(rank: int, least: float, most: float) -> None:
    found = []
    for seed in range(12):
        torch.manual_seed(seed)
        gradient = torch.randn(64, rank, dtype=torch.float64) @ torch.randn(
            rank, 96, dtype=torch.float64
        )
        rounding = torch.randn_like(gradient) * gradient.norm() / gradient.numel() ** 0.5 * 1e-7
        one, other = update(gradient), update(gradient + rounding)
        found.append(float((one - other).norm() / one.norm()))
    assert least < max(found) < most
