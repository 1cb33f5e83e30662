"""Exact products of a query with every key, and sums of values by weights: the bits of a query follow from it and from the keys that it
sees alone, not from other queries, nor from keys whose weight is 0, nor from how many there are of them and where. Of float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from plait.inference.canonical import exact_products as exact

MOST_KEYS = 1 << 16
_BITS = exact.bits_of(MOST_KEYS)
_AT_ONCE = 1 << 22
"""Scores that are computed at once."""
Product = Callable[[torch.Tensor], torch.Tensor]


def with_keys(key: torch.Tensor, *, slices: int) -> Product:
    """Scores [..., queries, keys] of queries [..., queries, width]; `key` [..., keys, width]."""
    bits = exact.bits_of(key.shape[-1])
    by_key = exact.exponents(key)
    keys_split = exact.leading_last(exact.split(key, by_key, bits=bits, slices=slices))

    def scores(query: torch.Tensor) -> torch.Tensor:
        by_query = exact.exponents(query)
        left = exact.leading_first(exact.split(query, by_query, bits=bits, slices=slices))
        return exact.rounded(exact.level_sums(left, keys_split, slices=slices), by_query, by_key, bits=bits)

    return scores


def with_values(value: torch.Tensor, *, slices: int) -> Product:
    """Sums [..., queries, width of values] by weights [..., queries, keys]; `value` [..., keys, width of values]. The exponent of every
    key's value goes to its weights, so a key of weight 0 has no part in any scale."""
    by_value = exact.exponents(value)
    values_split = exact.leading_last([part.mT for part in exact.split(value, by_value, bits=_BITS, slices=slices)])

    def sums(weights: torch.Tensor) -> torch.Tensor:
        weights = weights * exact.power_of_two(by_value).mT
        by_row = exact.exponents(weights)
        left = exact.leading_first(exact.split(weights, by_row, bits=_BITS, slices=slices))
        levels = exact.level_sums(left, values_split, slices=slices)
        return exact.rounded(levels, by_row, torch.zeros_like(by_value[..., :1, :]), bits=_BITS)

    return sums


def in_parts(product: Callable[[slice], torch.Tensor], batch: torch.Size, queries: int, keys: int) -> list[torch.Tensor]:
    """`product` of parts of the queries, of which each has no more scores than fit. None where there are no queries."""
    rows = max(1, _AT_ONCE // max(1, keys * math.prod(batch)))
    return [product(slice(start, start + rows)) for start in range(0, queries, rows)]
