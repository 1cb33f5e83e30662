"""Memory layout of tensors: contiguous, transposed, channels last, or with gaps.

A gradient that an optimizer's fused kernel reads must have the memory layout of its parameter.
"""

from __future__ import annotations

from math import prod

import torch


def dims_in_memory(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions in the order of their strides, largest first.

    The result is None if the tensor has gaps or overlaps.
    """
    dims = sorted(
        range(tensor.ndim), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]), reverse=True
    )
    expected = 1
    for dim in reversed(dims):
        # A dimension of length 1 may have any stride.
        if tensor.shape[dim] != 1 and tensor.numel():
            if tensor.stride(dim) != expected:
                return None
            expected *= tensor.shape[dim]
    return dims


def like_in_memory(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """View a flat tensor in the shape and the memory layout of another one.

    If the layout of `tensor` has gaps, the view is contiguous.

    Args:
        flat: A contiguous tensor [tensor.numel()].
        tensor: The tensor with the shape and the strides.
    """
    if dims_in_memory(tensor) is None or tensor.is_contiguous():
        return flat.view(tensor.shape)
    return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if two elements share memory, as in an expanded tensor.

    Unusual strides may give a false positive.
    """
    dims = sorted((dim for dim in range(tensor.ndim) if tensor.shape[dim] > 1), key=tensor.stride)
    end = 0
    if not prod(tensor.shape):
        return False
    # From the smallest stride to the largest, each must step over all elements before it.
    for dim in dims:
        if tensor.stride(dim) <= end:
            return True
        end += (tensor.shape[dim] - 1) * tensor.stride(dim)
    return False
