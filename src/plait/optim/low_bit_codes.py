"""Quantization to 8 bits with a scale for every block: how `optimizer.states` int8 and float8 store
AdamW's moments.

int8 is the dynamic map of 8-bit Adam (arXiv 2110.02861, as in bitsandbytes and torchao): 256 levels
between -1 and 1, or 0 and 1, more of them in every higher power of ten from 1e-6 on. float8 is
e4m3. A block is divided by its largest magnitude. A second moment never becomes 0: a small one in a
block with a large one would divide its update by almost nothing. Plain operators, nothing is
compiled.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

_TINY = torch.finfo(torch.float32).tiny
_FLOAT8 = torch.float8_e4m3fn


class Codec(Protocol):
    """Quantizes blocks of elements and dequantizes them."""

    def encode(self, numbers: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(uint8 [n], float32 scales [n / block]) of floating `numbers` [n]. A block with what is
        not finite decodes to NaN or infinity.
        """

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """float32 [n], a new tensor."""


def levels(*, signed: bool) -> torch.Tensor:
    """float32 [256], ascending: the numbers that int8's codes stand for, before the scale. Rounded
    once, so the same on every machine.
    """
    found = [0.0, 1.0]
    for power in range(7):
        edges = np.linspace(0.1, 1, 2 ** (power if signed else power + 1) + 1)
        middles = 10.0 ** (power - 6) * (edges[:-1] + edges[1:]) / 2
        found += [*middles.tolist(), *((-middles).tolist() if signed else ())]
    return torch.tensor(sorted(found), dtype=torch.float32)


class DynamicInt8:
    """The nearest code, found by the upper half of an element's bits: at most one border between
    two codes lies among the values that share them, so one table look-up and one comparison replace
    a search.
    """

    def __init__(self, *, signed: bool, device: torch.device) -> None:
        table = levels(signed=signed)
        borders = (table[1:] + table[:-1]) / 2
        halves = torch.arange(1 << 16, dtype=torch.int32) << 16
        least = torch.where(halves < 0, halves | 0xFFFF, halves).view(torch.float32)
        below = torch.bucketize(least, borders, right=True)
        self._levels = table.to(device)
        self._code = below.to(torch.uint8).to(device)
        """By the upper half: the code of the smallest number that has it."""
        self._border = torch.cat([borders, borders.new_tensor([torch.inf])])[below].to(device)
        """By the upper half: the next border."""
        self._least = 0 if signed else 1

    def encode(self, numbers: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See Codec."""
        scaled, scales = _scaled(numbers, block)
        half = scaled.view(torch.int32).bitwise_right_shift(16).bitwise_and_(0xFFFF)
        codes = torch.index_select(self._code, 0, half)
        codes.add_(scaled >= torch.index_select(self._border, 0, half))
        return codes.clamp_(min=self._least), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """See Codec."""
        numbers = torch.index_select(self._levels, 0, codes.int())
        return numbers.view(scales.numel(), -1).mul_(scales.unsqueeze(1)).view(-1)


class Float8:
    """e4m3, whose largest number is 448."""

    def __init__(self, *, signed: bool) -> None:
        self._least = 0 if signed else 1

    def encode(self, numbers: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See Codec."""
        scaled, scales = _scaled(numbers, block, largest=torch.finfo(_FLOAT8).max)
        return scaled.to(_FLOAT8).view(torch.uint8).clamp_(min=self._least), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """See Codec."""
        return (
            codes.view(_FLOAT8).float().view(scales.numel(), -1).mul_(scales.unsqueeze(1)).view(-1)
        )


def _scaled(
    numbers: torch.Tensor, block: int, *, largest: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 [n], at most `largest` in magnitude; the scales that were divided by)."""
    blocked = numbers.float().view(-1, block)
    scales = (blocked.abs().amax(1) / largest).clamp_(min=_TINY)
    return (blocked / scales.unsqueeze(1)).view(-1), scales
