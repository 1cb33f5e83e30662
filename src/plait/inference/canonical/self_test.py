"""Whether this machine computes as canonical arithmetic needs it: samples, at the start of every canonical call."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from plait.inference.canonical import exact_products as exact
from plait.inference.canonical import sums
from plait.inference.canonical.attention import attention
from plait.inference.canonical.elementwise import elementwise

_FUNCTIONS = (torch.exp, torch.log, torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.erf, torch.rsqrt, F.silu, F.gelu, F.softplus)
_PLACES = ((0, 1), (1, 65), (5, 8), (31, 64), (3, 100), (17, 1017))
"""Parts of a vector that are computed alone."""


class Broken(Exception):
    """This machine gives other bits for the same numbers."""


def self_test(dtype: torch.dtype) -> bytes:
    """A hash of what the samples gave, equal on ranks that compute alike; 32 bytes. Raises Broken with what differs."""
    numbers = torch.Generator().manual_seed(0)
    hashed = hashlib.sha256()
    with torch.no_grad():
        for found in (*_products(dtype, numbers), *_elements(dtype, numbers), *_sums(numbers), _attention(dtype, numbers)):
            hashed.update(found.double().contiguous().numpy().tobytes())
    return hashed.digest()


def _spread(shape: tuple[int, ...], numbers: torch.Generator) -> torch.Tensor:
    """Float64, of magnitudes over some ten orders, which every dtype can hold."""
    magnitudes = torch.exp(3 * torch.randn(shape, generator=numbers, dtype=torch.float64))
    return torch.randn(shape, generator=numbers, dtype=torch.float64) * magnitudes.clamp(max=1e3)


def _products(dtype: torch.dtype, numbers: torch.Generator) -> Iterator[torch.Tensor]:
    for rows, columns, terms in ((64, 48, 96), (3, 20, 3000)):
        slices, bits = exact.slices_of(dtype), exact.bits_of(terms)
        x, weight = (_spread((size, terms), numbers).to(dtype).double() for size in (rows, columns))
        of_rows, of_columns = exact.exponents(x), exact.exponents(weight)
        left = exact.split(x, of_rows, bits=bits, slices=slices)
        right = exact.split(weight, of_columns, bits=bits, slices=slices)
        levels = exact.level_sums(exact.leading_first(left), exact.leading_last(right), slices=slices)
        for level, found in enumerate(levels):
            together = sum(left[at].long() @ right[level - at].long().T for at in range(level + 1))
            _check(torch.equal(found.long(), torch.as_tensor(together)), f"sums of {terms} products of integers in float64 are not exact")
        found = exact.rounded(levels, of_rows, of_columns, bits=bits)
        for row in (0, rows - 1):
            one = exact.level_sums(exact.leading_first([part[row : row + 1] for part in left]), exact.leading_last(right), slices=slices)
            alone = exact.rounded(one, of_rows[row : row + 1], of_columns, bits=bits)
            _check(torch.equal(alone, found[row : row + 1]), f"a row of {terms} products alone is not that row among {rows}")
        for ranks in (2, 3, 4):
            parts = [
                exact.level_sums(exact.leading_first(list(one)), exact.leading_last(list(other)), slices=slices)
                for one, other in zip(
                    zip(*(part.chunk(ranks, -1) for part in left), strict=True),
                    zip(*(part.chunk(ranks, -1) for part in right), strict=True),
                    strict=True,
                )
            ]
            split = exact.rounded(torch.stack(parts).sum(0), of_rows, of_columns, bits=bits)
            _check(torch.equal(split, found), f"a sum split over {ranks} ranks is not the sum on one")
        yield found


def _elements(dtype: torch.dtype, numbers: torch.Generator) -> Iterator[torch.Tensor]:
    x = (3 * torch.randn(1100, generator=numbers, dtype=torch.float64)).abs().to(dtype)
    for wide in {dtype, torch.float64}:
        for function in _FUNCTIONS:
            found = elementwise(function, [x.to(wide)])
            for low, high in _PLACES:
                alone = elementwise(function, [x[low:high].to(wide)])
                _check(torch.equal(alone, found[low:high]), f"{function.__name__} of an element depends on its place in a tensor")
    for function in _FUNCTIONS:
        yield elementwise(function, [x])
    yield elementwise(torch.exp, [-x.double()])


def _sums(numbers: torch.Generator) -> Iterator[torch.Tensor]:
    x = _spread((32, 93), numbers)
    for function in (sums.mean, sums.variance, sums.softmax, sums.log_softmax):
        found = function(x)
        _check(torch.equal(function(x[7:8]), found[7:8]), f"the {function.__name__} of a row alone is not that of the row among 32")
        yield found


def _attention(dtype: torch.dtype, numbers: torch.Generator) -> torch.Tensor:
    slices = exact.slices_of(dtype)
    query, key, value = (torch.randn(2, 4, 40, 16, generator=numbers, dtype=torch.float64).to(dtype) for _ in range(3))
    found = attention(query, key, value, None, causal=True, scale=None, slices=slices)
    for at in (0, 17, 39):
        seen = (key[..., : at + 1, :], value[..., : at + 1, :])
        alone = attention(query[..., at : at + 1, :], *seen, None, causal=False, scale=None, slices=slices)
        _check(torch.equal(alone, found[..., at : at + 1, :]), "one query is not that query in the full pass")
    padded = [torch.cat([1e4 * one[..., :9, :], one], -2) for one in (key, value)]
    mask = torch.cat([torch.zeros(40, 9, dtype=torch.bool), torch.ones(40, 40, dtype=torch.bool).tril()], -1)
    again = attention(query[:, 1:3], padded[0][:, 1:3], padded[1][:, 1:3], mask, causal=False, scale=None, slices=slices)
    _check(torch.equal(again, found[:, 1:3]), "keys that are masked, or other heads, change a query")
    return found


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Broken(otherwise)
