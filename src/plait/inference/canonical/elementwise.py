"""Functions of single elements, computed so that where an element lies in memory does not matter.

Torch's CPU kernels compute what does not fill a vector register by another code than the rest, with other last bits (silu, gelu, sigmoid,
pow), and so do they the ends of every thread's part and tensors with gaps. Here all elements lie one after the other, in pieces that one
thread computes, filled up to full registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_REGISTERS = 64
"""Elements; a multiple of what two registers hold of any dtype."""
_PIECE = 1 << 14
"""Elements; below the number from which torch uses several threads."""


def elementwise(function: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`function` of tensors, which are broadcast; it returns one element for every element."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    count = shape.numel()
    padding = -count % _REGISTERS
    flat = [_in_a_row(tensor.expand(shape), padding) for tensor in tensors]
    pieces = [function(*(one[start : start + _PIECE] for one in flat)) for start in range(0, count, _PIECE)]
    if not pieces:
        return function(*(tensor.expand(shape) for tensor in tensors))
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[:count].view(shape)


def _in_a_row(tensor: torch.Tensor, padding: int) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return torch.cat([flat, flat.new_ones(padding)]) if padding else flat
