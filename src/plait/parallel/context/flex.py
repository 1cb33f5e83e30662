"""torch's FlexAttention for a part of a softmax: outputs and denominators, and gradients where the softmax is over more keys.

What a query sees is a function of places, so that blocks of scores of which none is seen are not computed. It is compiled, but on CPUs,
where torch has no backward for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

Both = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Scores:
    """What a layer does to the scores of queries from place `query_at` of the sequence on, and keys from `key_at` on. `starts`
    [batch, queries]: where the document of a query begins, or None. `window`: as many tokens a query sees, itself included; None: all."""

    query_at: int
    key_at: int
    starts: torch.Tensor | None
    window: int | None
    scale: float
    softcap: float | None


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> Both:
    """(output [batch, heads, n, width], logarithm of the denominator [batch, heads, n], -inf where a query sees no key) of queries
    [batch, heads, n, head_dim], and keys and values [batch, kv_heads, m, ...]; differentiable."""
    from torch.nn.attention.flex_attention import AuxRequest

    cap = scores.softcap or 1.0

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.tanh(score / cap) * cap

    output, more = _function("flex_attention", query.device.type)(
        query,
        key,
        value,
        score_mod=None if scores.softcap is None else capped,
        block_mask=_mask(query, key, scores),
        scale=scores.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return output, more.lse


def gradients(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, grad: torch.Tensor, found: Both
) -> tuple[torch.Tensor, ...]:
    """Of query, key and value. `grad` is of the output; `found` is the output and the denominator over all keys.

    With o and l the output and the logarithm of the denominator over these keys, O and L those over all, the output is a sum of parts
    exp(l - L) o, so its gradient g is w g with w = exp(l - L) for o, and w (g o - g O) for l."""
    query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
    with torch.enable_grad():
        output, denominator = attention(query, key, value, scores)
    wide = denominator.dtype
    weight = torch.exp(denominator.detach() - found[1].to(wide))
    of_output = weight.unsqueeze(-1) * grad.to(wide)
    of_denominator = (of_output * (output.detach().to(wide) - found[0].to(wide))).sum(-1)
    return torch.autograd.grad((output, denominator), (query, key, value), (of_output.to(output.dtype), of_denominator))


def _mask(query: torch.Tensor, key: torch.Tensor, scores: Scores) -> Any:
    starts, window = scores.starts, scores.window
    at = torch.tensor([scores.query_at, scores.key_at], device=query.device)

    def seen(batch: torch.Tensor, _head: torch.Tensor, query_index: torch.Tensor, key_index: torch.Tensor) -> torch.Tensor:
        place, other = query_index + at[0], key_index + at[1]
        visible = other <= place
        if window is not None:
            visible = visible & (other > place - window)
        if starts is not None:
            visible = visible & (other >= starts[batch, query_index])
        return visible

    rows = None if starts is None else len(query)
    return _function("create_block_mask", query.device.type)(seen, rows, None, query.shape[2], key.shape[2], device=query.device)


@cache
def _function(name: str, device_type: str) -> Any:
    from torch.nn.attention import flex_attention

    found = getattr(flex_attention, name)
    return found if device_type == "cpu" else torch.compile(found)
