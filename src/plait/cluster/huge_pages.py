"""Weights in host memory on huge pages.

A product that reads every weight once then spends less time in page tables: 4 to 7 % of a token
(`benchmarks/results/host_memory.json`).
"""

from __future__ import annotations

import mmap
from math import prod

import torch
from torch import nn

from plait._torch.dtensor import local_tensor

PAGE = 2 << 20
"""Bytes of a huge page."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised, on the CPU, beginning with a huge page; as `torch.empty` where the system has
    none, or the tensor is smaller.
    """
    size = prod(shape) * dtype.itemsize
    if size < PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    # what nobody writes to takes no memory
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE
    end = start + size // PAGE * PAGE
    memory.madvise(mmap.MADV_HUGEPAGE, start, end - start)
    memory.madvise(mmap.MADV_NOHUGEPAGE, end)  # the rest, which would take a page of its own
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=start).view(shape)


@torch.no_grad()
def move_parameters(model: nn.Module) -> None:
    """Give this rank's parts of parameters on the CPU memory of this kind, before they have
    values.
    """
    for parameter in model.parameters():
        part = local_tensor(parameter)
        if part.device.type == "cpu" and part.is_contiguous() and part.nbytes >= PAGE:
            part.set_(empty(tuple(part.shape), part.dtype))  # type: ignore[call-overload]
