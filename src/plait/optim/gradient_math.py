"""Norms and scaling of gradients with at least the precision of float32.

torch computes a norm in the tensor's dtype, and rounds a factor to that dtype. The largest float16
number is 65504, and bfloat16 has three significant digits. A CPU sum in a wider dtype first copies
the tensor to that dtype, so long tensors are processed in chunks on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait._torch.operators import (
    foreach_mul_,
    foreach_norm,
    foreach_unscale_,
    grouped_by_device_and_dtype,
)
from plait.cluster import accelerator

_CHUNK = 1 << 20
"""Number of elements that a CPU widens at a time: 4 MiB in float32."""


def norms_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the Euclidean norm of every plain tensor: 0-dimensional, on its device.

    The norms are float32, or have the dtype of the tensor if that is wider.
    """
    norms: dict[int, torch.Tensor] = {}
    for indices in grouped_by_device_and_dtype(tensors):
        group = [tensors[index] for index in indices]
        norms.update(zip(indices, _norms_of_group(group), strict=True))
    return [norms[index] for index in range(len(tensors))]


def _norms_of_group(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the norms of tensors of one device and dtype."""
    if tensors[0].dtype.itemsize >= 4:
        return foreach_norm(tensors, 2.0)
    if tensors[0].device.type != "cpu":
        return foreach_norm(tensors, 2.0, dtype=torch.float32)
    return [_norm_in_float32(tensor) for tensor in tensors]


def _norm_in_float32(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() <= _CHUNK:
        return torch.linalg.vector_norm(tensor, 2.0, dtype=torch.float32)
    norms = [_norm_in_float32(chunk) for chunk in tensor.reshape(-1).split(_CHUNK)]
    return torch.linalg.vector_norm(torch.stack(norms), 2.0)


def joined_norm(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of a vector from the norms of its parts: 0-dimensional, float64.

    Args:
        norms: 0-dimensional tensors, at least one. They may be on several devices; the result is on
            the device of the first.
    """
    joined = []
    for indices in grouped_by_device_and_dtype(norms):
        stack = torch.stack([norms[index] for index in indices])
        # One cast for all parameters. A cast per parameter would be as many kernels.
        joined.append(torch.linalg.vector_norm(stack, 2.0, dtype=torch.float64))
    if len(joined) == 1:
        return joined[0]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in joined]), 2.0)


def multiply_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply plain tensors by one factor in place, in as few kernels as possible."""
    for indices in grouped_by_device_and_dtype(tensors):
        group = [tensors[index] for index in indices]
        dtype = group[0].dtype
        device = group[0].device
        if dtype.itemsize < 4:
            # `mul` would round the factor to the dtype. This kernel of the gradient scaler
            # multiplies in float32, and raises a flag for infinities, which is not read here.
            if isinstance(factor, torch.Tensor):
                scale = factor.to(device, torch.float32)
            else:
                scale = accelerator.tensor_of(factor, dtype=torch.float32, device=device)
            foreach_unscale_(group, torch.zeros((), dtype=torch.float32, device=device), scale)
        elif isinstance(factor, torch.Tensor):
            foreach_mul_(group, factor.to(device, dtype))
        else:
            foreach_mul_(group, factor)
