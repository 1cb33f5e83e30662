"""Attention whose bits for a query follow from it and from the keys that it sees alone: not from other queries, nor from keys that are
masked, nor from how many there are of them and where. So a prompt at once, a token at a time and a full sequence give the same.

Scores are exact products, a softmax's denominator is a sum of integers, and the sum over values is an exact product, too.
"""

from __future__ import annotations

import math

import torch

from plait.inference.canonical.batched import in_parts, with_keys, with_values
from plait.inference.canonical.sums import exponentials


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float | None,
    slices: int,
) -> torch.Tensor:
    """[..., queries, width of values] in the dtype of `query` [..., queries, width]; `key` [..., keys, width], `value` [..., keys, width of
    values]. `mask`, boolean or added to scores, can be broadcast to [..., queries, keys]; `causal` aligns the first key with the first
    query. A query that sees no key gets zeros."""
    queries, keys, width = query.shape[-2], key.shape[-2], query.shape[-1]
    if causal:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
    scores_of = with_keys(key.double(), slices=slices)
    sums_of = with_values(value.double(), slices=slices)
    factor = 1 / math.sqrt(width) if scale is None else scale

    def part(rows: slice) -> torch.Tensor:
        scores = scores_of(query[..., rows, :].double()) * factor
        if mask is not None:
            here = mask[..., rows, :] if mask.shape[-2] > 1 else mask
            scores = scores.masked_fill(~here, -math.inf) if here.dtype == torch.bool else scores + here.double()
        weights, total = exponentials(scores)
        return torch.where(total == 0, 0.0, sums_of(weights) / total).to(query.dtype)

    found = in_parts(part, query.shape[:-2], queries, keys)
    return torch.cat(found, dim=-2) if found else query.new_zeros(*query.shape[:-1], value.shape[-1])
