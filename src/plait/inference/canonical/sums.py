"""Sums along the last dimension whose bits follow from the numbers alone, and what is computed from them. Of float64."""

from __future__ import annotations

import math

import torch

from plait.inference.canonical.elementwise import elementwise

_HALF = math.ldexp(1.0, 26)


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """[..., n] to [..., 1], in the order of a balanced tree. Elements are added by kernels that round each addition by itself."""
    length = x.shape[-1]
    if length == 0:
        return x.new_zeros(*x.shape[:-1], 1)
    while length > 1:
        half = 1 << (length - 1).bit_length() - 1
        x = torch.cat([x[..., : length - half] + x[..., half:], x[..., length - half : half]], dim=-1)
        length = half
    return x


def mean(x: torch.Tensor) -> torch.Tensor:
    """[..., n] to [..., 1]."""
    return tree_sum(x) / x.shape[-1]


def variance(x: torch.Tensor, *, correction: float = 0.0) -> torch.Tensor:
    """[..., n] to [..., 1]."""
    away = x - mean(x)
    return tree_sum(away * away) / (x.shape[-1] - correction)


def exponentials(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponentials of `x` [..., n] below their maximum, and their sum [..., 1], which is 0 where all are minus infinity. It is a sum of
    integers of at most 2^26, exact for 2^26 of them: their order, and zeros among them, change nothing."""
    if not x.shape[-1]:
        return x, x.new_zeros(*x.shape[:-1], 1)
    top = x.amax(-1, keepdim=True)
    powers = elementwise(torch.exp, [x - torch.where(top == -math.inf, 0.0, top)])
    high = torch.round(powers * _HALF)
    low = torch.round((powers * _HALF - high) * _HALF)
    return powers, (high.sum(-1, keepdim=True) + low.sum(-1, keepdim=True) / _HALF) / _HALF


def softmax(x: torch.Tensor) -> torch.Tensor:
    """[..., n]."""
    powers, total = exponentials(x)
    return powers / total


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """[..., n]."""
    _, total = exponentials(x)
    return x - x.amax(-1, keepdim=True) - elementwise(torch.log, [total])
