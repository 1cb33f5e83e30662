"""Quantisation to 8 or 4 bits with one scale per block, and the packing of flat ranges.

A block of consecutive elements is divided by a float32 scale and rounded to the nearest integers.
The scale is the largest magnitude of the block over 127 (8 bits) or 7 (4 bits). If any element is
not finite, no element of the dequantised block is finite, so the receiver detects the overflow.
Matrices are padded to a multiple of the block size and quantised. Tensors with fewer than two
dimensions (norms, biases) are sent uncompressed. They have few elements, whose magnitudes differ
from those of matrices.

The module does not communicate.

Note [Operators of quantisation]
    The operators were chosen by measurements on CPUs. `amax` and `amin` are vectorised, while
    `aminmax` is not and takes 15 times as long. Packing contiguous halves of a block is 8 times as
    fast as packing every second number. In-place operators allocate no new pages of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from plait.comm.collectives import add_in_order
from plait.errors import ModelError
from plait.sizes import wide_dtype

Bits = Literal[4, 8]
BLOCK = 256
"""Elements that share a scale, so that 8.125 or 4.125 bits per element are sent."""
_HALF = BLOCK // 2
_LARGEST = {8: 127, 4: 7}
"""Largest integer by bits per element."""
_SCALE_BYTES = 4
_SMALLEST_SCALE = 1e-37
"""Scale below which a block is sent as zeros, because the inverse would not be finite."""


def blocks_of(numel: Any) -> Any:
    """Return the number of blocks of `numel` elements, rounded up (an int or an array)."""
    return -(-numel // BLOCK)


def packed_bytes(numel: Any, bits: Any) -> Any:
    """Return the bytes of `numel` quantised elements with padding and scales (ints or arrays)."""
    return blocks_of(numel) * (BLOCK * bits // 8 + _SCALE_BYTES)


def quantise(x: torch.Tensor, bits: Bits) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows of floating-point numbers.

    Args:
        x: Tensor [rows, n], where n is a multiple of BLOCK.
        bits: Bits per element.

    Returns:
        (codes uint8 [rows, n x bits / 8], scales float32 [rows, n / BLOCK]).
    """
    if x.dtype != torch.float32:
        # Verification in float64 (`verify.keep_float64`) skips `x.float()`, but scales are float32.
        x = torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x)
    rounded, scales = _round(x, bits)
    return _encode(rounded, bits), scales


def _round(x: torch.Tensor, bits: Bits) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide float32 `x` [rows, n] by the scales of its blocks, and round.

    Returns:
        (integers as float32 [rows, n / BLOCK, BLOCK], scales [rows, n / BLOCK]).
    """
    # See Note [Operators of quantisation].
    blocks = x.view(x.shape[0], -1, BLOCK)
    scales = torch.maximum(blocks.amax(-1), -blocks.amin(-1)) / _LARGEST[bits]
    inverse = torch.where(scales > _SMALLEST_SCALE, 1 / scales, 0)
    return (blocks * inverse.unsqueeze(-1)).round_(), scales


def _encode(rounded: torch.Tensor, bits: Bits) -> torch.Tensor:
    """Return integers [rows, blocks, BLOCK] as uint8 [rows, blocks x BLOCK x bits / 8]."""
    # Any code of a number that is not finite is multiplied by a scale that is not finite.
    codes = rounded.to(torch.int8).view(torch.uint8)
    if bits == 4:
        # The low bits of a byte are from the first half of a block, the high bits from the second.
        codes = (codes[..., :_HALF] & 15) | (codes[..., _HALF:] << 4)
    return codes.view(rounded.shape[0], -1)


def dequantise(codes: torch.Tensor, scales: torch.Tensor, bits: Bits) -> torch.Tensor:
    """Return float32 [rows, n] from the results of `quantise`.

    An element differs from the original by at most half a scale.
    """
    rows = codes.shape[0]
    values = torch.empty(rows, scales.shape[1], BLOCK, dtype=torch.float32, device=codes.device)
    blocks = codes.view(torch.int8).view(rows, scales.shape[1], BLOCK * bits // 8)
    if bits == 8:
        values.copy_(blocks)
    else:
        # Shifts of signed integers extend the sign.
        values[..., :_HALF].copy_(blocks << 4 >> 4)
        values[..., _HALF:].copy_(blocks >> 4)
    return values.mul_(scales.unsqueeze(-1)).view(rows, -1)


@dataclass(frozen=True)
class Segment:
    """Consecutive elements of one parameter in a flat range.

    Attributes:
        numel: Number of elements.
        matrix: Whether the parameter has two or more dimensions, so that it is quantised.
    """

    numel: int
    matrix: bool


@dataclass(frozen=True)
class Packing:
    """Conversion between rows [rows, n] of floating-point numbers and packed rows of bytes.

    A row consists of segments. A packed row consists of the codes of all matrices, their scales,
    and the uncompressed segments.

    Attributes:
        segments: Segments of a row.
        bits: Bits per quantised element.
    """

    segments: tuple[Segment, ...]
    bits: Bits

    @classmethod
    def for_rows(cls, segments: Sequence[Segment], bits: Bits, *, numel: int) -> Packing:
        """Return the packing of rows of `numel` elements.

        With a secondary partition, `fully_shard` gathers larger shards of the same parameters. All
        segments are then larger by the same factor.

        Raises:
            ModelError: `numel` is not a multiple of the total size of the segments, because some
                parameters have no gradient. A block could then mix parameters that must not share a
                scale.
        """
        total = sum(segment.numel for segment in segments)
        if total == 0 or numel % total:
            raise ModelError(
                f"compressed gradients: {numel} elements of a unit are reduced, but its trainable"
                f" parameters have {total} on this rank, because a step left some of them unused;"
                " set parallel.unused_parameters = true, or do not compress"
            )
        factor = numel // total
        return cls(tuple(Segment(s.numel * factor, s.matrix) for s in segments), bits)

    @cached_property
    def padded(self) -> int:
        """Number of quantised elements of a row, padding included."""
        return sum(blocks_of(s.numel) * BLOCK for s in self.segments if s.matrix)

    @cached_property
    def _exact_numel(self) -> int:
        """Number of uncompressed elements of a row."""
        return sum(s.numel for s in self.segments if not s.matrix)

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one packed row."""
        quantised = sum(packed_bytes(s.numel, self.bits) for s in self.segments if s.matrix)
        return quantised + self._exact_numel * dtype.itemsize

    def matrices(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the matrices of rows [rows, n] as float32 [rows, padded].

        Each matrix is padded with zeros to a multiple of the block size. If nothing has to be
        changed, the result is `rows` itself.
        """
        if len(self.segments) == 1 and self.padded == rows.shape[1] and rows.dtype == torch.float32:
            return rows
        padded = rows.new_zeros(rows.shape[0], self.padded, dtype=torch.float32)
        offset = 0
        for segment, columns in self._columns(rows):
            if segment.matrix:
                padded[:, offset : offset + segment.numel].copy_(columns)
                offset += blocks_of(segment.numel) * BLOCK
        return padded

    def _columns(self, rows: torch.Tensor) -> Iterator[tuple[Segment, torch.Tensor]]:
        """Yield (segment, columns of the segment) for rows [rows, n]."""
        sizes = [segment.numel for segment in self.segments]
        return zip(self.segments, rows.split(sizes, 1), strict=True)

    def pack(
        self,
        rows: torch.Tensor,
        error: torch.Tensor | None = None,
        *,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Quantise rows [rows, n], and return them as uint8 [rows, row_bytes].

        Args:
            rows: Rows of floating-point numbers.
            error: Residual [rows, padded] of earlier steps, which is added before the rows are
                quantised.
            into: Tensor that receives the new residual. Without it, `error` is overwritten.
        """
        value = self.matrices(rows)
        residual = None
        if error is not None:
            residual = value = torch.add(error, value, out=error if into is None else into)
        rounded, scales = _round(value, self.bits)
        if residual is not None:
            residual.view_as(rounded).addcmul_(rounded, scales.unsqueeze(-1), value=-1)
            if not scales.isfinite().all():
                # An overflow must not reach later steps.
                residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

        # Each is [rows, bytes].
        fields = [_encode(rounded, self.bits), scales.view(torch.uint8)]
        exact = [columns for segment, columns in self._columns(rows) if not segment.matrix]
        if exact:
            fields.append(torch.cat(exact, 1).contiguous().view(torch.uint8))
        return torch.cat(fields, 1)

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return packed rows as rows [rows, n] in `dtype`, the dtype of the rows before packing."""
        return self._assemble(*self._fields(packed, dtype), dtype)

    def unpack_sum(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum [n] of packed rows in `dtype`.

        Rows are added in their order, in float32, or in float64 if `dtype` is float64.
        """
        matrices, exact = self._fields(packed, dtype)
        wide = wide_dtype(dtype)
        return self._assemble(_sum_in_order(matrices), _sum_in_order(exact.to(wide)), dtype)[0]

    def _fields(
        self, packed: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (matrices [rows, padded], uncompressed elements) of packed rows."""
        code_bytes = self.padded * self.bits // 8
        scale_bytes = self.padded // BLOCK * _SCALE_BYTES
        exact_bytes = packed.shape[1] - code_bytes - scale_bytes
        codes, scales, exact = packed.split([code_bytes, scale_bytes, exact_bytes], 1)
        matrices = dequantise(
            _view_bytes(codes, torch.uint8), _view_bytes(scales, torch.float32), self.bits
        )
        return matrices, _view_bytes(exact, dtype)

    def _assemble(
        self, matrices: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return rows [rows, n] from matrices [rows, padded] and uncompressed elements."""
        columns = []
        matrix_offset = 0
        exact_offset = 0
        for segment in self.segments:
            if segment.matrix:
                columns.append(matrices[:, matrix_offset : matrix_offset + segment.numel].to(dtype))
                matrix_offset += blocks_of(segment.numel) * BLOCK
            else:
                columns.append(exact[:, exact_offset : exact_offset + segment.numel].to(dtype))
                exact_offset += segment.numel
        return columns[0] if len(columns) == 1 else torch.cat(columns, 1)


def _sum_in_order(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum [1, n] of rows [rows, n]. The rows may be overwritten.

    On the CPU `torch.sum` adds the last columns of a tensor in a different order. Which columns a
    parameter has depends on how tensor parallelism has split earlier parameters, so `torch.sum`
    would give replicated parameters different sums on different ranks.
    """
    if rows.device.type != "cpu":
        return rows.sum(0, keepdim=True)
    if len(rows) > 1:
        add_in_order(list(rows), [rows[0]])
    return rows[:1]


def _view_bytes(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes [rows, n] of a larger buffer as elements of `dtype`."""
    if raw.numel() == 0:
        return raw.new_empty(raw.shape[0], 0, dtype=dtype)
    # A slice of bytes is not aligned, so it is copied.
    return torch.empty(raw.shape, dtype=torch.uint8, device=raw.device).copy_(raw).view(dtype)
