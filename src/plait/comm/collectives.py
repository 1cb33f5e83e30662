"""Differentiable collectives for tensor parallelism.

Each function is named after its forward. Its backward is the adjoint.

    function       forward                   backward                  used for
    enter          identity                  all-reduce                replicated input of a
                                                                       column-split layer
    leave          all-reduce, in place      identity                  partial output of a
                                                                       row-split layer
    gather         all-gather along dim      slice of this rank        sharded output that
                                                                       replicated code reads
    split          slice of this rank        all-gather                replicated input that is
                                                                       used in slices
    gather_sum     all-gather along dim      reduce-scatter            sequence-sharded input of a
                                                                       column-split layer
    leave_scatter  reduce-scatter along dim  all-gather                partial output that becomes
                                                                       sequence shards

`gather` and `split` assume that every rank performs the same computation after (before) them.
`gather_sum` sums the gradients of different computations. Shards follow `plait.shards`, which is
the rule of `torch.chunk`, so sizes need not be divisible. With `group=None` (a mesh dimension of
size 1) every function is the identity.
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
    """Return (start, size) of this rank's shard of a dimension."""
    if group is None:
        return 0, length
    ranks = group.size()
    rank = group.rank()
    return min(rank * shard_size(length, ranks), length), shard_length(length, ranks, rank)


def enter(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Return a replicated tensor as input of tensor-parallel code (Megatron's f).

    Its gradients are summed over the ranks. Collective in the backward.
    """
    if group is None:
        return x
    return _Enter.apply(x, group)


def leave(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Return the sum of partial tensors over the ranks (Megatron's g). Collective.

    The sum may overwrite `x`, so nothing else may use `x` afterwards.
    """
    if group is None:
        return x
    return _Leave.apply(x, group)


def gather(x: torch.Tensor, group: ProcessGroup | None, *, dim: int, length: int) -> torch.Tensor:
    """Return the full tensor for replicated code. Collective.

    Args:
        x: This rank's shard.
        group: The process group.
        dim: Dimension along which the tensor is sharded.
        length: Size of the full tensor along `dim`.
    """
    if group is None:
        return x
    return _Gather.apply(x, group, dim % x.ndim, length)


def split(x: torch.Tensor, group: ProcessGroup | None, *, dim: int) -> torch.Tensor:
    """Return this rank's slice of a replicated tensor. Collective in the backward."""
    if group is None:
        return x
    return _Split.apply(x, group, dim % x.ndim)


def gather_sum(
    x: torch.Tensor, group: ProcessGroup | None, *, dim: int, length: int
) -> torch.Tensor:
    """Return the full tensor for code that differs between ranks. Collective.

    Args:
        x: This rank's shard.
        group: The process group.
        dim: Dimension along which the tensor is sharded.
        length: Size of the full tensor along `dim`.
    """
    if group is None:
        return x
    return _GatherSum.apply(x, group, dim % x.ndim, length)


def leave_scatter(x: torch.Tensor, group: ProcessGroup | None, *, dim: int) -> torch.Tensor:
    """Return this rank's shard of the sum of partial tensors along `dim`. Collective."""
    if group is None:
        return x
    return _LeaveScatter.apply(x, group, dim % x.ndim)


def all_gather_dim(x: torch.Tensor, group: ProcessGroup, *, dim: int, length: int) -> torch.Tensor:
    """Concatenate the shards of all ranks along `dim`. Collective.

    The shards have the sizes `shard_lengths(length, ranks)`. The result is contiguous. If every
    dimension before `dim` has size 1, as in a micro-batch of one sequence, the shards are received
    directly into the result.
    """
    ranks = group.size()
    shape = [*x.shape]
    shape[dim] = shard_size(length, ranks)
    # Collectives require shards of equal size.
    x = _padded(x, dim, shape[dim])

    if _is_outermost(x, dim):
        gathered = x.new_empty(*shape[:dim], ranks * shape[dim], *shape[dim + 1 :])
        all_gather_single(gathered.view(ranks * shape[0], *shape[1:]), x.contiguous(), group=group)
        # Only full shards come before a short one and only empty ones after it, so padding sits at
        # the end.
        return _shortened(gathered, dim, length)

    # The collective stacks shards along dim 0: [ranks x shape[0], ...].
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
    """Sum over the ranks, and return this rank's shard of the sum along `dim`. Collective.

    The result is contiguous. If the shards of `x` follow each other in memory, `x` is sent without
    a copy.
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

    output = x.new_empty(shape)
    reduce_scatter(output, stacked, group)
    return _shortened(output, dim, shard_length(length, ranks, group.rank()))


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
    """Return the first `length` entries along `dim` of a contiguous, unshared tensor."""
    if x.shape[dim] == length:
        return x
    if _is_outermost(x, dim):
        # `narrow` would return a view, and autograd forbids in-place changes of a view that a
        # function returns.
        return x.resize_(*x.shape[:dim], length, *x.shape[dim + 1 :])
    return x.narrow(dim, 0, length).contiguous()


def slice_dim(x: torch.Tensor, group: ProcessGroup, *, dim: int) -> torch.Tensor:
    """Return this rank's shard of a replicated tensor, contiguous."""
    start, size = shard_range(x.shape[dim], group)
    return x.narrow(dim, start, size).contiguous()


def unshared(grad: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a gradient that may be changed in place.

    Autograd may use the gradient itself for other inputs too.
    """
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
        if x.is_contiguous() and not is_view(x):
            total = x
            ctx.mark_dirty(x)
        else:
            total = x.contiguous().clone()
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
        ctx.group = group
        ctx.dim = dim
        ctx.length = x.shape[dim]
        return slice_dim(x, group, dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather_dim(grad, ctx.group, dim=ctx.dim, length=ctx.length), None, None


class _GatherSum(_Gather):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return reduce_scatter_dim(grad, ctx.group, dim=ctx.dim), None, None, None


class _LeaveScatter(_Split):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group = group
        ctx.dim = dim
        ctx.length = x.shape[dim]
        return reduce_scatter_dim(x, group, dim=dim)
