"""Quantization to 8 or 4 bits with one scale per block, and the packing of a flat range of
parameters. No communication here.

A block of consecutive elements is divided by its largest magnitude over 127 (8 bits) or 7 (4 bits)
and rounded to the nearest; the scale is float32. An element that is not finite makes its block so,
hence the receiver still sees an overflow. Matrices are quantised, each padded to a multiple of the
block size; tensors with fewer than two dimensions (norms, biases: few elements, of another size)
are sent uncompressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from plait.comm.reduce_scatter import add_in_order
from plait.errors import ModelError

Bits = Literal[4, 8]
BLOCK = 256
"""Elements that share a scale: 8.125 or 4.125 bits per element are sent."""
_HALF = BLOCK // 2
_LARGEST = {8: 127, 4: 7}
_SCALE_BYTES = 4
_SMALLEST_SCALE = 1e-37
"""A block with a smaller maximum is sent as zeros: the inverse of its scale would not be finite."""


def blocks_of(numel: Any) -> Any:
    """Blocks that hold `numel` elements (an int or an array)."""
    return -(-numel // BLOCK)


def packed_bytes(numel: Any, bits: Any) -> Any:
    """Bytes of `numel` elements padded to a multiple of the block size, with their scales (ints or
    arrays).
    """
    return blocks_of(numel) * (BLOCK * bits // 8 + _SCALE_BYTES)


def quantise(x: torch.Tensor, bits: Bits) -> tuple[torch.Tensor, torch.Tensor]:
    """(uint8 [rows, n x bits / 8], float32 scales [rows, n / BLOCK]) of a floating `x` [rows, n], n
    a multiple of BLOCK.
    """
    # not `x.float()`, which verification in float64 leaves out (`verify.keep_float64`): scales
    # are float32
    if x.dtype != torch.float32:
        x = torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x)
    rounded, scales = _rounded(x, bits)
    return _coded(rounded, bits), scales


# Which operators these are made of was measured on CPUs: amax and amin are vectorised there and
# aminmax is not (15 x), contiguous halves of a block are packed 8 x as fast as every second number,
# and what is in place needs no fresh pages.


def _rounded(x: torch.Tensor, bits: Bits) -> tuple[torch.Tensor, torch.Tensor]:
    """(whole numbers as float32 [rows, n / BLOCK, BLOCK], scales), of float32 `x` [rows, n]."""
    blocked = x.view(x.shape[0], -1, BLOCK)
    scales = torch.maximum(blocked.amax(-1), -blocked.amin(-1)) / _LARGEST[bits]
    inverse = torch.where(scales > _SMALLEST_SCALE, 1 / scales, 0)
    return (blocked * inverse.unsqueeze(-1)).round_(), scales


def _coded(rounded: torch.Tensor, bits: Bits) -> torch.Tensor:
    # Not finite: whatever comes out of the cast is multiplied by a scale that is not finite.
    codes = rounded.to(torch.int8).view(torch.uint8)
    # a byte has a number of the block's first half, and above it the one of the second half
    if bits == 4:
        codes = (codes[..., :_HALF] & 15) | (codes[..., _HALF:] << 4)
    return codes.view(rounded.shape[0], -1)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, bits: Bits) -> torch.Tensor:
    """float32 [rows, n], the inverse of `quantise` up to half a scale."""
    rows = codes.shape[0]
    found = torch.empty(rows, scales.shape[1], BLOCK, dtype=torch.float32, device=codes.device)
    blocked = codes.view(torch.int8).view(rows, scales.shape[1], BLOCK * bits // 8)
    if bits == 8:
        found.copy_(blocked)
    else:
        found[..., :_HALF].copy_(blocked << 4 >> 4)  # of signed numbers: the sign is shifted in
        found[..., _HALF:].copy_(blocked >> 4)
    return found.mul_(scales.unsqueeze(-1)).view(rows, -1)


@dataclass(frozen=True)
class Segment:
    """Consecutive elements of one parameter in a flat range."""

    numel: int
    matrix: bool
    """At least two dimensions: quantised."""


@dataclass(frozen=True)
class Packing:
    """How rows [rows, n], each a run of parameters, become bytes and back."""

    segments: tuple[Segment, ...]
    bits: Bits

    @classmethod
    def of(cls, segments: Sequence[Segment], bits: Bits, *, numel: int) -> Packing:
        """For rows of `numel` elements. `fully_shard` gathers larger shards of the same parameters
        where it keeps a secondary partition inside a machine. Raises ModelError for a number that
        is not a multiple of the segments: some parameters are missing, and which is not known, so a
        block would mix parameters that must not share a scale.
        """
        total = sum(segment.numel for segment in segments)
        if total == 0 or numel % total:
            raise ModelError(
                f"compressed gradients: {numel} elements of a unit came to be reduced, and its"
                f" trainable parameters have {total} on this rank: a step left some of them unused;"
                " set parallel.unused_parameters = true, or compress nothing"
            )
        return cls(tuple(Segment(s.numel * (numel // total), s.matrix) for s in segments), bits)

    @cached_property
    def padded(self) -> int:
        """Elements of a row that are quantised, padding included."""
        return sum(blocks_of(s.numel) * BLOCK for s in self.segments if s.matrix)

    @cached_property
    def _exact(self) -> int:
        return sum(s.numel for s in self.segments if not s.matrix)

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one row on the wire."""
        return (
            sum(packed_bytes(s.numel, self.bits) for s in self.segments if s.matrix)
            + self._exact * dtype.itemsize
        )

    def matrices(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [rows, padded] of the quantised segments, each padded with zeros to a multiple of
        the block size; `rows` itself where nothing else is in it.
        """
        if len(self.segments) == 1 and self.padded == rows.shape[1] and rows.dtype == torch.float32:
            return rows
        padded = rows.new_zeros(rows.shape[0], self.padded, dtype=torch.float32)
        at = 0
        for segment, part in zip(
            self.segments, rows.split([s.numel for s in self.segments], 1), strict=True
        ):
            if segment.matrix:
                padded[:, at : at + segment.numel].copy_(part)
                at += blocks_of(segment.numel) * BLOCK
        return padded

    def pack(
        self,
        rows: torch.Tensor,
        error: torch.Tensor | None = None,
        *,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """uint8 [rows, row_bytes]. `error` [rows, padded], where given, is added first; what this
        packing loses is written into `into`, or over `error`.
        """
        value = self.matrices(rows)
        if error is not None:
            error = value = torch.add(error, value, out=error if into is None else into)
        rounded, scales = _rounded(value, self.bits)
        if error is not None:
            error.view_as(rounded).addcmul_(rounded, scales.unsqueeze(-1), value=-1)
            if not scales.isfinite().all():
                # an overflow is of this step only
                error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        pieces = [_coded(rounded, self.bits), scales.view(torch.uint8)]
        parts = zip(self.segments, rows.split([s.numel for s in self.segments], 1), strict=True)
        exact = [part for segment, part in parts if not segment.matrix]
        if exact:
            pieces.append(torch.cat(exact, 1).contiguous().view(torch.uint8))
        return torch.cat(pieces, 1)

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[rows, n] in `dtype`, from what `pack` made of rows in `dtype`."""
        return self._assemble(*self._parts(packed, dtype), dtype)

    def unpack_sum(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[n]: the sum of the rows, in the order of the rows, in float32 (float64 for what was
        float64).
        """
        matrices, exact = self._parts(packed, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return self._assemble(_sum_in_order(matrices), _sum_in_order(exact.to(wide)), dtype)[0]

    def _parts(self, packed: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        code_bytes = self.padded * self.bits // 8
        scale_bytes = self.padded // BLOCK * _SCALE_BYTES
        codes, scales, exact = packed.split(
            [code_bytes, scale_bytes, packed.shape[1] - code_bytes - scale_bytes], 1
        )
        return dequantise(
            _read(codes, torch.uint8), _read(scales, torch.float32), self.bits
        ), _read(exact, dtype)

    def _assemble(
        self, matrices: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        parts = []
        at = 0
        exact_at = 0
        for segment in self.segments:
            if segment.matrix:
                parts.append(matrices[:, at : at + segment.numel].to(dtype))
                at += blocks_of(segment.numel) * BLOCK
            else:
                parts.append(exact[:, exact_at : exact_at + segment.numel].to(dtype))
                exact_at += segment.numel
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _sum_in_order(rows: torch.Tensor) -> torch.Tensor:
    """[1, n]: the sum of the rows [rows, n], which may be written to. Every column alike: torch's
    sum adds the last columns of a tensor in another order than the rest, and where a parameter sits
    depends on what tensor parallelism has split before it.
    """
    if rows.device.type != "cpu":
        return rows.sum(0, keepdim=True)
    if len(rows) > 1:
        add_in_order(list(rows), [rows[0]])
    return rows[:1]


def _read(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes [rows, n] of a larger buffer as numbers; copied, because a slice of bytes is not
    aligned.
    """
    if raw.numel() == 0:
        return raw.new_empty(raw.shape[0], 0, dtype=dtype)
    return torch.empty(raw.shape, dtype=torch.uint8, device=raw.device).copy_(raw).view(dtype)
