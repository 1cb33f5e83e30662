"""Weights in host memory on huge pages.

A product that reads every weight once then spends less time in page tables, which is 4 to 7 % of
the time of a token (`benchmarks/results/host_memory.json`).
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
    """Return an uninitialised CPU tensor that begins at a huge page.

    If the tensor is smaller than a huge page, or the system has none, the result is that of
    `torch.empty`.
    """
    numel = prod(shape)
    size = numel * dtype.itemsize
    if size < PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)

    # The additional page leaves room for the alignment. Pages that are never written take no
    # memory.
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE
    end = start + size // PAGE * PAGE
    memory.madvise(mmap.MADV_HUGEPAGE, start, end - start)
    # The end of the tensor would otherwise take a full huge page.
    memory.madvise(mmap.MADV_NOHUGEPAGE, end)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=start).view(shape)


@torch.no_grad()
def move_parameters(model: nn.Module) -> None:
    """Replace the memory of this rank's CPU parameters by huge pages.

    Values are not copied, so call this before the parameters are initialised.
    """
    for parameter in model.parameters():
        local = local_tensor(parameter)
        if local.device.type == "cpu" and local.is_contiguous() and local.nbytes >= PAGE:
            local.set_(empty(tuple(local.shape), local.dtype))  # type: ignore[call-overload]
