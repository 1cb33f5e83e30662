"""Attention whose bits for a query follow from it and from the keys that it sees alone: not from other queries, nor from keys that are
masked, nor from how many there are of them and where. So a prompt at once, a token at a time and a full sequence give the same.

Scores are exact products. A softmax's denominator is a sum of integers, and the sum over values is an exact product, too: the exponent of
every key's value goes to the probabilities, so a key with probability 0 has no part in any scale.
"""

from __future__ import annotations

import math

import torch

from plait.inference.canonical import exact_products as exact
from plait.inference.canonical.sums import exponentials

MOST_KEYS = 1 << 16
_BITS = exact.bits_of(MOST_KEYS)
_AT_ONCE = 1 << 22
"""Scores that are computed at once."""


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
    bits = exact.bits_of(width)
    by_key = exact.exponents(key := key.double())
    keys_split = exact.leading_last(exact.split(key, by_key, bits=bits, slices=slices))
    by_value = exact.exponents(value := value.double())
    values_split = exact.leading_last([part.mT for part in exact.split(value, by_value, bits=_BITS, slices=slices)])
    factor = 1 / math.sqrt(width) if scale is None else scale
    rows = max(1, _AT_ONCE // max(1, keys * math.prod(query.shape[:-2])))
    found = []
    for start in range(0, queries, rows):
        part = query[..., start : start + rows, :].double()
        by_query = exact.exponents(part)
        left = exact.leading_first(exact.split(part, by_query, bits=bits, slices=slices))
        levels = exact.level_sums(left, keys_split, slices=slices)
        scores = exact.rounded(levels, by_query, by_key, bits=bits) * factor
        if mask is not None:
            here = mask[..., start : start + rows, :] if mask.shape[-2] > 1 else mask
            scores = scores.masked_fill(~here, -math.inf) if here.dtype == torch.bool else scores + here.double()
        weights, total = exponentials(scores)
        weights = weights * exact.power_of_two(by_value).mT
        by_row = exact.exponents(weights)
        left = exact.leading_first(exact.split(weights, by_row, bits=_BITS, slices=slices))
        levels = exact.level_sums(left, values_split, slices=slices)
        sums = exact.rounded(levels, by_row, torch.zeros_like(by_value[..., :1, :]), bits=_BITS)
        found.append(torch.where(total == 0, 0.0, sums / total).to(query.dtype))
    return torch.cat(found, dim=-2) if found else query.new_zeros(*query.shape[:-1], value.shape[-1])
