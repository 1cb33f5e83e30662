"""Norms and scaling of gradients, never in fewer digits than float32.

torch takes a norm in the tensor's own dtype, and rounds a factor to it: float16 ends at 65504, bfloat16 has three digits. A CPU makes a
wider copy of what it adds up wider, so long tensors are processed there in chunks.
"""

from __future__ import annotations

import torch

from plait._torch.operators import foreach_mul_, foreach_norm, foreach_unscale_
from plait.cluster import accelerator

_PIECE = 1 << 20
"""Elements that a CPU widens at a time: 4 MiB in float32."""


def norms_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Euclidean norm of every plain tensor: 0-dimensional, on its device, float32 or wider."""
    if all(tensor.dtype.itemsize >= 4 for tensor in tensors):
        return list(foreach_norm(tensors, 2.0))
    return [_norm(tensor) for tensor in tensors]


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.itemsize >= 4:
        return torch.linalg.vector_norm(tensor, 2.0)
    if tensor.device.type != "cpu" or tensor.numel() <= _PIECE:
        return torch.linalg.vector_norm(tensor, 2.0, dtype=torch.float32)
    pieces = tensor.reshape(-1).split(_PIECE)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(piece, 2.0, dtype=torch.float32) for piece in pieces]), 2.0)


def multiply_all(tensors: list[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply plain tensors by one factor, in place, in as few kernels as possible."""
    for dtype, device in {(tensor.dtype, tensor.device) for tensor in tensors}:
        same = [tensor for tensor in tensors if tensor.dtype == dtype and tensor.device == device]
        if dtype.itemsize < 4:
            foreach_unscale_(same, torch.zeros((), dtype=torch.float32, device=device), _in_float32(factor, device))
        else:
            foreach_mul_(same, factor.to(device, dtype) if isinstance(factor, torch.Tensor) else factor)


def _in_float32(factor: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    if isinstance(factor, torch.Tensor):
        return factor.to(device, torch.float32)
    return accelerator.tensor_of(factor, dtype=torch.float32, device=device)
