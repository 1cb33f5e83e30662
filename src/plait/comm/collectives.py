"""Differentiable collectives for tensor parallelism, also for hand-made layers: each names what it does forward, and its backward is the
adjoint.

    function           forward                          backward                          used where
    enter              identity                         all-reduce                        replicated input of a column-split layer
    leave              all-reduce (in place)            identity                          partial output of a row-split layer
    gather             all-gather along dim             own slice                         sharded output that replicated code reads
    split              own slice along dim              all-gather                        replicated input that is used in slices
    gather_sum         all-gather along dim             reduce-scatter                    sequence-sharded input of a column-split layer
    leave_scatter      reduce-scatter along dim         all-gather                        partial output back to sequence shards

`gather` and `split` assume that what follows (came before) is computed on every rank; `gather_sum` sums what differs. Shards follow
`plait.shards`: torch.chunk's rule, so sizes need not divide. With `group=None` (an axis of degree 1) each is the identity.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from plait._torch.flat_collectives import all_gather_single
from plait._torch.storage import is_view
from plait.comm.reduce_scatter import reduce_scatter
from plait.shards import shard_length, shard_size


def shard_range(length: int, group: ProcessGroup | None) -> tuple[int, int]:
    """(start, size) of this rank's shard."""
    if group is None:
        return 0, length
    ranks, rank = group.size(), group.rank()
    return min(rank * shard_size(length, ranks), length), shard_length(length, ranks, rank)


def enter(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Copies `x`, replicated on every rank, to the tensor-parallel region (Megatron's f): identity forward, all-reduce backward."""
    return x if group is None else _Enter.apply(x, group)


def leave(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Sum of the ranks' partial `x`. Works in place: nothing else may use `x` afterwards."""
    return x if group is None else _Leave.apply(x, group)


def gather(x: torch.Tensor, group: ProcessGroup | None, *, dim: int, length: int) -> torch.Tensor:
    """The full tensor from its shards along `dim`, whose global size is `length`."""
    return x if group is None else _Gather.apply(x, group, dim % x.ndim, length)


def split(x: torch.Tensor, group: ProcessGroup | None, *, dim: int) -> torch.Tensor:
    """This rank's slice of a replicated `x`."""
    return x if group is None else _Split.apply(x, group, dim % x.ndim)


def gather_sum(x: torch.Tensor, group: ProcessGroup | None, *, dim: int, length: int) -> torch.Tensor:
    """The full tensor from its shards, for ranks that compute different parts of what follows."""
    return x if group is None else _GatherSum.apply(x, group, dim % x.ndim, length)


def leave_scatter(x: torch.Tensor, group: ProcessGroup | None, *, dim: int) -> torch.Tensor:
    """This rank's shard of the sum of the ranks' partial `x`."""
    return x if group is None else _LeaveScatter.apply(x, group, dim % x.ndim)


# ---- without gradients ----------------------------------------------------------------------------------------------------------------


def all_gather_dim(x: torch.Tensor, group: ProcessGroup, *, dim: int, length: int) -> torch.Tensor:
    """Concatenate shards of `shard_lengths(length, ranks)` along `dim`; contiguous."""
    ranks = group.size()
    size = shard_size(length, ranks)
    if x.shape[dim] < size:  # collectives want equal parts
        padding = list(x.shape)
        padding[dim] = size - x.shape[dim]
        x = torch.cat([x, x.new_zeros(padding)], dim)
    stacked = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    all_gather_single(stacked, x.contiguous(), group=group)
    whole = stacked if dim == 0 else torch.cat(stacked.chunk(ranks), dim)
    # Only full shards come before a short one and only empty ones after it, so padding sits at the end.
    return whole if ranks * size == length else whole.narrow(dim, 0, length).contiguous()


def reduce_scatter_dim(x: torch.Tensor, group: ProcessGroup, *, dim: int) -> torch.Tensor:
    """Sum over ranks, of which this rank keeps its shard along `dim`; contiguous."""
    ranks, length = group.size(), x.shape[dim]
    size = shard_size(length, ranks)
    if ranks * size > length:
        padding = list(x.shape)
        padding[dim] = ranks * size - length
        x = torch.cat([x, x.new_zeros(padding)], dim)
    stacked = x.contiguous() if dim == 0 else torch.cat(x.chunk(ranks, dim))
    mine = x.new_empty(stacked.shape[0] // ranks, *stacked.shape[1:])
    reduce_scatter(mine, stacked, group)
    kept = shard_length(length, ranks, group.rank())
    return mine if kept == size else mine.narrow(dim, 0, kept).contiguous()


def slice_dim(x: torch.Tensor, group: ProcessGroup, *, dim: int) -> torch.Tensor:
    """This rank's shard of a replicated tensor, contiguous."""
    start, size = shard_range(x.shape[dim], group)
    return x.narrow(dim, start, size).contiguous()


def unshared(grad: torch.Tensor) -> torch.Tensor:
    """A contiguous copy to sum in place: autograd may still hold the gradient elsewhere."""
    return grad.contiguous().clone()


def _summed(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    total = unshared(x)
    dist.all_reduce(total, group=group)
    return total


# ---- with gradients -------------------------------------------------------------------------------------------------------------------


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        total = x if x.is_contiguous() and not is_view(x) else x.contiguous().clone()
        if total is x:
            ctx.mark_dirty(x)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int, length: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather_dim(x, group, dim=dim, length=length)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return slice_dim(grad, ctx.group, dim=ctx.dim), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.length = group, dim, x.shape[dim]
        return slice_dim(x, group, dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather_dim(grad, ctx.group, dim=ctx.dim, length=ctx.length), None, None


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int, length: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather_dim(x, group, dim=dim, length=length)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return reduce_scatter_dim(grad, ctx.group, dim=ctx.dim), None, None, None


class _LeaveScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.length = group, dim, x.shape[dim]
        return reduce_scatter_dim(x, group, dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather_dim(grad, ctx.group, dim=ctx.dim, length=ctx.length), None, None
