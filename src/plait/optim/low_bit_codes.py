"""Quantization to 8 bits with a scale per block, for AdamW's moments (`optimizer.states`).

int8 is the dynamic map of 8-bit Adam (arXiv 2110.02861, as in bitsandbytes and torchao): 256 levels
between -1 and 1, or 0 and 1, with more levels in every higher power of ten from 1e-6 on. float8 is
e4m3. A block is divided by its largest magnitude. Only plain operators are used; nothing is
compiled.

Note [Second moments are not 0]
    The smallest code of a second moment is 1, not 0. Otherwise a small moment in a block with a
    large one would become 0, and its update would be divided by epsilon only.
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
        """Quantize a flat tensor.

        Args:
            numbers: Floating point, [n]. A block with non-finite numbers decodes to NaN or
                infinity.
            block: Number of elements per block, a divisor of n.

        Returns:
            Codes (uint8, [n]) and scales (float32, [n / block]).
        """

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the numbers of codes [n] and scales [n / block]: a new tensor, float32, [n]."""


def levels(*, signed: bool) -> torch.Tensor:
    """Return the numbers that the codes of int8 stand for, before the scale.

    They are rounded once, so they are the same on every machine.

    Args:
        signed: Whether half of the numbers are negative.

    Returns:
        float32, [256], ascending.
    """
    numbers = [0.0, 1.0]
    for power in range(7):
        exponent = power if signed else power + 1
        edges = np.linspace(0.1, 1, 2**exponent + 1)
        middles = 10.0 ** (power - 6) * (edges[:-1] + edges[1:]) / 2
        numbers += middles.tolist()
        if signed:
            numbers += (-middles).tolist()
    return torch.tensor(sorted(numbers), dtype=torch.float32)


class DynamicInt8:
    """Codec that rounds to the nearest of 256 levels.

    The code is looked up by the upper 16 bits of an element. At most one border between two codes
    lies among the values that share them, so one table look-up and one comparison replace a search.

    Args:
        signed: Whether numbers may be negative.
        device: Device of the tables.
    """

    def __init__(self, *, signed: bool, device: torch.device) -> None:
        table = levels(signed=signed)
        borders = (table[1:] + table[:-1]) / 2
        upper_halves = torch.arange(1 << 16, dtype=torch.int32) << 16
        # The smallest float32 with each upper half. For negative numbers it has all lower bits set.
        lower_bits = torch.where(upper_halves < 0, upper_halves | 0xFFFF, upper_halves)
        smallest = lower_bits.view(torch.float32)
        codes = torch.bucketize(smallest, borders, right=True)
        self._levels = table.to(device)
        self._code = codes.to(torch.uint8).to(device)
        """Code of the smallest number with each upper half, [65536]."""
        self._border = torch.cat([borders, borders.new_tensor([torch.inf])])[codes].to(device)
        """Next border above that number, [65536]."""
        # See Note [Second moments are not 0].
        self._least = 0 if signed else 1

    def encode(self, numbers: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize a flat tensor. See `Codec.encode`."""
        scaled, scales = _scaled(numbers, block)
        upper_half = scaled.view(torch.int32).bitwise_right_shift(16).bitwise_and_(0xFFFF)
        codes = torch.index_select(self._code, 0, upper_half)
        codes.add_(scaled >= torch.index_select(self._border, 0, upper_half))
        return codes.clamp_(min=self._least), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Dequantize codes. See `Codec.decode`."""
        numbers = torch.index_select(self._levels, 0, codes.int())
        return numbers.view(scales.numel(), -1).mul_(scales.unsqueeze(1)).view(-1)


class Float8:
    """Codec of e4m3, whose largest number is 448."""

    def __init__(self, *, signed: bool) -> None:
        self._least = 0 if signed else 1

    def encode(self, numbers: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize a flat tensor. See `Codec.encode`."""
        scaled, scales = _scaled(numbers, block, largest=torch.finfo(_FLOAT8).max)
        return scaled.to(_FLOAT8).view(torch.uint8).clamp_(min=self._least), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Dequantize codes. See `Codec.decode`."""
        numbers = codes.view(_FLOAT8).float()
        return numbers.view(scales.numel(), -1).mul_(scales.unsqueeze(1)).view(-1)


def _scaled(
    numbers: torch.Tensor, block: int, *, largest: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide each block by its scale.

    Returns:
        Numbers of at most `largest` in magnitude (float32, [n]), and the scales (float32,
        [n / block]).
    """
    # [blocks, block]
    blocked = numbers.float().view(-1, block)
    scales = (blocked.abs().amax(1) / largest).clamp_(min=_TINY)
    return (blocked / scales.unsqueeze(1)).view(-1), scales
