"""How a tensor lies in memory: contiguous, transposed, channels last, or with gaps.

A gradient that an optimizer's fused kernel reads must have the memory layout of its parameter.
"""

from __future__ import annotations

from math import prod

import torch


def dims_in_memory(tensor: torch.Tensor) -> list[int] | None:
    """The dimensions, the one with the largest stride first, of a tensor that fills its memory
    without gaps or overlaps; else None.
    """
    dims = sorted(
        range(tensor.ndim), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]), reverse=True
    )
    expected = 1
    for dim in reversed(dims):
        if tensor.shape[dim] != 1 and tensor.numel():
            if tensor.stride(dim) != expected:
                return None
            expected *= tensor.shape[dim]
    return dims


def like_in_memory(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`flat` [tensor.numel()], contiguous, as a view of the shape of `tensor`, with its strides
    where that has no gaps.
    """
    if dims_in_memory(tensor) is None or tensor.is_contiguous():
        return flat.view(tensor.shape)
    return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements share memory, as those of an expanded tensor do. May say so of unusual
    strides that do not.
    """
    dims = sorted((dim for dim in range(tensor.ndim) if tensor.shape[dim] > 1), key=tensor.stride)
    reached = 0
    for dim in dims if prod(tensor.shape) else ():
        if tensor.stride(dim) <= reached:
            return True
        reached += (tensor.shape[dim] - 1) * tensor.stride(dim)
    return False
