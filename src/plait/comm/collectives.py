"""Differentiable collectives for tensor parallelism, also for hand-made layers: each names what it
does forward, and its backward is the adjoint.

    function           forward                          backward                          used where
    enter              identity                         all-reduce                        replicated
    input of a column-split layer leave              all-reduce (in place)            identity
    partial output of a row-split layer gather             all-gather along dim             own
    slice                         sharded output that replicated code reads split              own
    slice along dim              all-gather                        replicated input that is used in
    slices gather_sum         all-gather along dim             reduce-scatter
    sequence-sharded input of a column-split layer leave_scatter      reduce-scatter along dim
    all-gather                        partial output back to sequence shards

`gather` and `split` assume that what follows (came before) is computed on every rank; `gather_sum`
sums what differs. Shards follow `plait.shards`: torch.chunk's rule, so sizes need not divide. With
`group=None` (an axis of degree 1) each is the identity.
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
    ranks = group.size()
    rank = group.rank()
    return min(rank * shard_size(length, ranks), length), shard_length(length, ranks, rank)


def enter(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Copies `x`, replicated on every rank, to the tensor-parallel region (Megatron's f): identity
    forward, all-reduce backward.
    """
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


def gather_sum(
    x: torch.Tensor, group: ProcessGroup | None, *, dim: int, length: int
) -> torch.Tensor:
    """The full tensor from its shards, for ranks that compute different parts of what follows."""
    return x if group is None else _GatherSum.apply(x, group, dim % x.ndim, length)


def leave_scatter(x: torch.Tensor, group: ProcessGroup | None, *, dim: int) -> torch.Tensor:
    """This rank's shard of the sum of the ranks' partial `x`."""
    return x if group is None else _LeaveScatter.apply(x, group, dim % x.ndim)


def all_gather_dim(x: torch.Tensor, group: ProcessGroup, *, dim: int, length: int) -> torch.Tensor:
    """Concatenate shards of `shard_lengths(length, ranks)` along `dim`. The result is contiguous.

    If every dimension before `dim` has size 1, as in a micro-batch of one sequence, the shards are
    received directly into the result.
    """
    ranks = group.size()
    shape = [*x.shape]
    shape[dim] = shard_size(length, ranks)
    x = _padded(x, dim, shape[dim])  # collectives require shards of equal size

    if _is_outermost(x, dim):
        gathered = x.new_empty(*shape[:dim], ranks * shape[dim], *shape[dim + 1 :])
        all_gather_single(gathered.view(ranks * shape[0], *shape[1:]), x.contiguous(), group=group)
        # Only full shards come before a short one and only empty ones after it, so padding sits at
        # the end.
        return _shortened(gathered, dim, length)

    stacked = x.new_empty(ranks * shape[0], *shape[1:])
    all_gather_single(stacked, x.contiguous(), group=group)
    shards = list(stacked.chunk(ranks))
    if ranks * shape[dim] > length:
        shards = [
            shard.narrow(dim, 0, shard_length(length, ranks, rank))
            for rank, shard in enumerate(shards)
        ]
    return torch.cat(shards, dim)


def reduce_scatter_dim(x: torch.Tensor, group: ProcessGroup, *, dim: int) -> torch.Tensor:
    """Sum over ranks, and return this rank's shard of the sum along `dim`. The result is
    contiguous.

    If the shards of `x` follow each other in memory, `x` is sent without a copy.
    """
    ranks = group.size()
    length = x.shape[dim]
    size = shard_size(length, ranks)
    shape = [*x.shape]
    shape[dim] = size
    if ranks * size == length and _is_outermost(x, dim):
        stacked = x.contiguous().view(ranks * shape[0], *shape[1:])
    else:
        shards = [_padded(shard, dim, size) for shard in x.split(size, dim)]
        # `split` makes no empty shards, which the last ranks have if there are fewer entries than
        # ranks.
        if len(shards) < ranks:
            shards += [x.new_zeros(shape)] * (ranks - len(shards))
        stacked = torch.cat(shards)

    mine = x.new_empty(shape)
    reduce_scatter(mine, stacked, group)
    return _shortened(mine, dim, shard_length(length, ranks, group.rank()))


def _is_outermost(x: torch.Tensor, dim: int) -> bool:
    """Return whether shards along `dim` follow each other in the memory of a contiguous tensor."""
    return all(size == 1 for size in x.shape[:dim])


def _padded(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    if x.shape[dim] == length:
        return x
    padding = [*x.shape]
    padding[dim] = length - x.shape[dim]
    return torch.cat([x, x.new_zeros(padding)], dim)


def _shortened(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Return the first `length` entries along `dim` of a contiguous tensor that nothing else
    uses.
    """
    if x.shape[dim] == length:
        return x
    if _is_outermost(x, dim):
        # `narrow` would return a view, and autograd forbids in-place changes of a view that a
        # function returns.
        return x.resize_(*x.shape[:dim], length, *x.shape[dim + 1 :])
    return x.narrow(dim, 0, length).contiguous()


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
    def forward(
        ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int, length: int
    ) -> torch.Tensor:
        ctx.group = group
        ctx.dim = dim
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
    def forward(
        ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int, length: int
    ) -> torch.Tensor:
        ctx.group = group
        ctx.dim = dim
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
