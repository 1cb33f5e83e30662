"""SDPA's flash kernel for CPUs, with the logarithm of each softmax's denominator, so that parts of a softmax can be put together."""

from __future__ import annotations

import torch

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def cpu_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [batch, heads, queries, head_dim], logarithm of the denominator [batch, heads, queries]). `causal` aligns the first key with
    the first query."""
    output, denominator = _FORWARD(query, key, value, 0.0, causal, scale=scale)
    return output, denominator


def cpu_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    denominator: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value. `output` and `denominator` may be of a softmax over more keys than these."""
    found = _BACKWARD(grad, query, key, value, output, denominator, 0.0, causal, scale=scale)
    return found[0], found[1], found[2]
