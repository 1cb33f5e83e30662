"""Collectives that gather into, or scatter out of, one contiguous tensor.

torch 2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor`. The arguments stayed the
same. The name is looked up in every call, so that code that replaces torch's function is seen.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

_RENAMED = hasattr(dist, "all_gather_single")


def all_gather_single(
    output: torch.Tensor,
    shard: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Gather the `shard` of every rank into `output`, in the order of the ranks. Collective."""
    gather = dist.all_gather_single if _RENAMED else dist.all_gather_into_tensor
    return gather(output, shard, group=group, async_op=async_op)


def reduce_scatter_single(
    output: torch.Tensor,
    full: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Sum `full` over the ranks and write this rank's shard of the sum to `output`. Collective."""
    scatter = dist.reduce_scatter_single if _RENAMED else dist.reduce_scatter_tensor
    return scatter(output, full, group=group, async_op=async_op)
