"""Matrix products whose bits follow from the two vectors of each element alone, whoever is beside them and however their sum is split.

Every row of one factor and every column of the other is written as a few integers of `bits` bits times powers of two, the leading ones
first (the splitting of Ozaki, Ogita, Oishi and Rump). Products of such integers, and all sums of them, are below 2^53, so float64 holds
them without rounding: no order of additions, no blocking of a kernel and no split over ranks can change them. What is rounded is rounded
element by element at the end. What the integers leave out is below 2^-36 of the largest element of a row for float32 and shorter dtypes,
and below 2^-54 for float64.
"""

from __future__ import annotations

import math

import torch

_LOWEST = -1000
"""Exponent of a row of zeros: of any other row another rank's part is larger."""
_EXACT = 52
"""Bits of a sum of products of integers, and one less than float64 holds."""


def slices_of(dtype: torch.dtype) -> int:
    """Integers that an element is written as."""
    return 3 if dtype == torch.float64 else 2


def bits_of(terms: int) -> int:
    """Of an integer, where `terms` products are added."""
    return (_EXACT - max(terms - 1, 0).bit_length()) // 2


def exponents(x: torch.Tensor) -> torch.Tensor:
    """The smallest e of every row of float64 `x` [..., n] with |x| < 2^e; int32 [..., 1]."""
    if not x.shape[-1]:
        return torch.full((*x.shape[:-1], 1), _LOWEST, dtype=torch.int32, device=x.device)
    largest = x.abs().amax(-1, keepdim=True)
    return torch.where(largest == 0, _LOWEST, torch.frexp(largest).exponent).clamp_(min=_LOWEST)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in float64, exactly, from -1022 to 1023: made of its bits."""
    return ((exponent.long().clamp(-1022, 1023) + 1023) << 52).view(torch.float64)


def split(x: torch.Tensor, exponent: torch.Tensor, *, bits: int, slices: int) -> list[torch.Tensor]:
    """Integers, in float64, of `x` [..., n] float64: x = 2^exponent (s0 2^-bits + s1 2^-2bits + ...) and a rest."""
    rest, found = x * power_of_two(-exponent), []
    for _ in range(slices):
        rest.mul_(math.ldexp(1.0, bits))
        found.append(torch.round(rest))
        rest.sub_(found[-1])
    return found


def leading_first(parts: list[torch.Tensor]) -> torch.Tensor:
    """The left factor [..., rows, slices x n] of `level_sums`."""
    return torch.cat(parts, dim=-1)


def leading_last(parts: list[torch.Tensor]) -> torch.Tensor:
    """The right factor [..., columns, slices x n]."""
    return torch.cat(parts[::-1], dim=-1)


def level_sums(left: torch.Tensor, right: torch.Tensor, *, slices: int) -> torch.Tensor:
    """[slices, ..., rows, columns]: for every level the exact sum of the products of slices whose numbers add up to it."""
    terms = left.shape[-1] // slices
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    found = left.new_empty(slices, *batch, left.shape[-2], right.shape[-2])
    for level in range(slices):
        torch.matmul(left[..., : (level + 1) * terms], right[..., (slices - 1 - level) * terms :].mT, out=found[level])
    return found


def rounded(levels: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, *, bits: int) -> torch.Tensor:
    """The product [..., rows, columns] in float64 from `level_sums`, whose memory it takes, and the exponents [..., rows, 1] and
    [..., columns, 1]."""
    total = levels[-1]
    for level in range(len(levels) - 2, -1, -1):
        total.mul_(math.ldexp(1.0, -bits)).add_(levels[level])
    return total.mul_(power_of_two(rows - 2 * bits)).mul_(power_of_two(columns).mT)
