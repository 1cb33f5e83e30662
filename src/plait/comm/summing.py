"""Sums of equal parts from several ranks, in the order of the ranks: the same bits on every rank and in every run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_BLOCK_BYTES = 256 * 1024
"""Small enough for a core's cache, so that memory is read once and written once."""


def add_in_order(pieces: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """Every output becomes the sum of the pieces, two or more. All are [n] of one dtype. The first output may be the first piece, others
    may be any. float16 and bfloat16 are summed in float32 and rounded once."""
    first, second, *rest = pieces
    dtype, numel = first.dtype, first.numel()
    block = max(1, _BLOCK_BYTES // dtype.itemsize)
    # Adding two rounds once anyway.
    wide = torch.empty(min(block, numel), dtype=torch.float32) if dtype in (torch.float16, torch.bfloat16) and rest else None
    for start in range(0, numel, block):
        stop = min(start + block, numel)
        here = outputs[0][start:stop]
        if wide is None:
            torch.add(first[start:stop], second[start:stop], out=here)
            for piece in rest:
                here.add_(piece[start:stop])
        else:
            total = wide[: stop - start]
            total.copy_(first[start:stop])
            for piece in (second, *rest):
                total.add_(piece[start:stop])
            here.copy_(total)
        for output in outputs[1:]:
            output[start:stop].copy_(here)
