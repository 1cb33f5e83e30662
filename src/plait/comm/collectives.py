"""Collectives that are differentiable, asynchronous, or add in a fixed order.

The functions for tensor parallelism are named after what the forward does. The backward is the
adjoint.

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

`gather` requires that all ranks compute the same values from its output. `split` requires that its
input is the same on all ranks. With `gather_sum`, ranks may compute different values from the
output, and the gradients of the output are summed. Shards have the sizes that `torch.chunk` gives
them, which may be uneven.

`reduce_scatter` for gloo is an all-to-all and a local sum. It sends the same bytes as gloo's own
reduce-scatter in less than half the time (measured at 4 to 16 MB on 2 and 4 ranks of one machine).
`fully_shard` uses it as a custom reduce-scatter. With NCCL, torch's own reduce-scatter is used.

`exchange_rows` is a differentiable all-to-all of rows, with a different number of rows for every
pair of ranks. `AsyncAllReduce` and `AsyncMaximum` reduce small tensors while computation continues.

Note [Second derivatives]
    A gradient penalty differentiates a backward (`create_graph=True`). torch records no collective,
    so the gradient of a bare collective in a backward would be wrong without an error. The backward
    of each function therefore calls the function of the table that is its adjoint: `enter` and
    `leave`, `gather` and `split`, `gather_sum` and `leave_scatter`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from plait._torch.groups import all_gather_single, reduce_scatter_single
from plait._torch.operators import FakeTensor
from plait._torch.tensors import is_view
from plait._torch.units import DefaultAllocMixin, ReduceScatter
from plait.cluster import accelerator
from plait.cluster.accelerator import HostCopy
from plait.cluster.layout import shard_length, shard_size
from plait.comm.failures import naming

_BLOCK_BYTES = 256 * 1024
"""Size of the blocks of a sum. A block fits a core's cache, so memory is read and written once."""
_MOST_ORDERED_ROWS = 4
"""Largest number of rows that `torch.sum` adds in the same order in every column.

With more rows, the last columns of a tensor are added in another order than the other columns. If
the tp dimension splits parameters unevenly, a replicated parameter behind them has different
columns on each rank, so its gradients would get different bits.
"""


def reduce_scatter(output: torch.Tensor, stacked: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Write this rank's shard of the sum of `stacked` to `output`. Collective.

    Rows are added in the order of the ranks.

    Args:
        output: Contiguous tensor [n, ...].
        stacked: Contiguous tensor [ranks x n, ...] of this rank.
        group: The process group.
    """
    if stacked.device.type != "cpu":
        reduce_scatter_single(output, stacked, group=group)
        return
    shards = torch.empty_like(stacked)
    dist.all_to_all_single(shards, stacked, group=group)
    ranks = group.size()
    if ranks <= _MOST_ORDERED_ROWS or isinstance(shards, FakeTensor):
        # [ranks, n, ...] -> [n, ...]
        torch.sum(shards.view(ranks, *output.shape), 0, out=output)
    else:
        add_in_order(list(shards.view(ranks, -1)), [output.view(-1)])


def add_in_order(addends: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """Write the sum of two or more tensors to every output, with the same bits on every rank.

    Tensors are added in their order. float16 and bfloat16 are summed in float32 and rounded once.

    Args:
        addends: Tensors [n] of one dtype.
        outputs: Tensors with the shape and the dtype of the addends. The first output may be the
            same tensor as the first addend. Every other output may be the same tensor as any
            addend.
    """
    first, second, *further = addends
    dtype = first.dtype
    numel = first.numel()
    block = max(1, _BLOCK_BYTES // dtype.itemsize)
    wide = None
    # A sum of two tensors is rounded once even without float32.
    if dtype in (torch.float16, torch.bfloat16) and further:
        wide = torch.empty(min(block, numel), dtype=torch.float32)

    for start in range(0, numel, block):
        stop = min(start + block, numel)
        total = outputs[0][start:stop]
        if wide is None:
            torch.add(first[start:stop], second[start:stop], out=total)
            for addend in further:
                total.add_(addend[start:stop])
        else:
            wide_total = wide[: stop - start]
            wide_total.copy_(first[start:stop])
            for addend in (second, *further):
                wide_total.add_(addend[start:stop])
            total.copy_(wide_total)
        for output in outputs[1:]:
            output[start:stop].copy_(total)


class SynchronousReduceScatter(ReduceScatter):
    """Base class of synchronous reduce-scatters for `fully_shard`."""

    @abstractmethod
    def reduce(self, output: torch.Tensor, stacked: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Write this rank's shard of the sum of `stacked` [ranks x n] to `output` [n]."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce-scatter `input_tensor` [ranks x n] into `output_tensor` [n]. Synchronous.

        Args:
            output_tensor: Receives this rank's shard of the sum.
            input_tensor: Addend of this rank.
            group: The process group.
            op: SUM or AVG.
            async_op: This argument is ignored.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(
                f"reduce-scatter supports SUM and AVG, not {op}; do not call"
                " set_gradient_divide_factor on the model"
            )
        self.reduce(output_tensor, input_tensor, group)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


class AllToAllReduceScatter(DefaultAllocMixin, SynchronousReduceScatter):
    """Reduce-scatter for `fully_shard` that always adds in the order of the ranks."""

    def reduce(self, output: torch.Tensor, stacked: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Write this rank's shard of the sum of `stacked` to `output`. See `reduce_scatter`."""
        reduce_scatter(output, stacked, group)


def shard_range(length: int, group: ProcessGroup) -> tuple[int, int]:
    """Return (start, size) of this rank's shard of a dimension."""
    ranks = group.size()
    rank = group.rank()
    return min(rank * shard_size(length, ranks), length), shard_length(length, ranks, rank)


def enter(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Pass a replicated tensor to tensor-parallel code (Megatron's f).

    Its gradients are summed over the ranks. Collective in the backward.
    """
    return _Enter.apply(x, group)


def leave(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return the sum of partial tensors over the ranks (Megatron's g). Collective.

    The sum may overwrite `x`, so nothing else may use `x` afterwards.
    """
    return _Leave.apply(x, group)


def gather(x: torch.Tensor, group: ProcessGroup, *, dim: int, length: int) -> torch.Tensor:
    """Return the full tensor for replicated code. Collective.

    Args:
        x: This rank's shard.
        group: The process group.
        dim: Dimension along which the tensor is sharded.
        length: Size of the full tensor along `dim`.
    """
    return _Gather.apply(x, group, dim % x.ndim, length)


def split(x: torch.Tensor, group: ProcessGroup, *, dim: int) -> torch.Tensor:
    """Return this rank's slice of a replicated tensor. Collective in the backward."""
    return _Split.apply(x, group, dim % x.ndim)


def gather_sum(x: torch.Tensor, group: ProcessGroup, *, dim: int, length: int) -> torch.Tensor:
    """Return the full tensor for code that differs between ranks. Collective.

    Args:
        x: This rank's shard.
        group: The process group.
        dim: Dimension along which the tensor is sharded.
        length: Size of the full tensor along `dim`.
    """
    return _GatherSum.apply(x, group, dim % x.ndim, length)


def leave_scatter(x: torch.Tensor, group: ProcessGroup, *, dim: int) -> torch.Tensor:
    """Sum partial tensors over the ranks, and shard the sum along `dim`. Collective."""
    return _LeaveScatter.apply(x, group, dim % x.ndim)


def all_gather_dim(x: torch.Tensor, group: ProcessGroup, *, dim: int, length: int) -> torch.Tensor:
    """Concatenate the shards of all ranks along `dim`. Collective.

    The shards have the sizes that `torch.chunk` gives them. The result is contiguous. If every
    dimension before `dim` has size 1, as in a micro-batch of one sequence, the shards are received
    directly into the result.

    Args:
        x: Shard of this rank.
        group: The process group.
        dim: Dimension along which the tensor is sharded, not negative.
        length: Size of the full tensor along `dim`.
    """
    ranks = group.size()
    shape = [*x.shape]
    shape[dim] = shard_size(length, ranks)
    # Collectives require shards of equal size.
    x = _padded(x, dim, shape[dim])

    if _is_outermost(x, dim):
        gathered = x.new_empty(*shape[:dim], ranks * shape[dim], *shape[dim + 1 :])
        all_gather_single(gathered.view(ranks * shape[0], *shape[1:]), x.contiguous(), group=group)
        # Only full shards come before a short one and only empty ones after it, so all padding is
        # at the end.
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
    """Sum `x` over the ranks, and shard the sum along `dim`. Collective.

    The result is this rank's shard, which is contiguous. If the shards of `x` follow each other in
    memory, `x` is sent without a copy.
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
    """Return True if each shard along `dim` of a contiguous tensor is contiguous."""
    return all(size == 1 for size in x.shape[:dim])


def _padded(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    if x.shape[dim] == length:
        return x
    padding = [*x.shape]
    padding[dim] = length - x.shape[dim]
    return torch.cat([x, x.new_zeros(padding)], dim)


def _shortened(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Return the first `length` entries of a contiguous tensor along `dim`. May resize `x`."""
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


def unshared(x: torch.Tensor) -> torch.Tensor:
    """Copy a gradient, so that the caller may change the contiguous copy in place.

    Autograd may use the original as the gradient of several inputs.
    """
    return x.contiguous().clone()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # See Note [Second derivatives].
        return leave(unshared(grad), ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        if x.is_contiguous() and not is_view(x):
            total = x
            ctx.mark_dirty(x)
        else:
            total = unshared(x)
        ctx.group = group
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return enter(grad, ctx.group), None


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
        return split(grad, ctx.group, dim=ctx.dim), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group = group
        ctx.dim = dim
        ctx.length = x.shape[dim]
        return slice_dim(x, group, dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gather(grad, ctx.group, dim=ctx.dim, length=ctx.length), None, None


class _GatherSum(_Gather):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return leave_scatter(grad, ctx.group, dim=ctx.dim), None, None, None


class _LeaveScatter(_Split):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group = group
        ctx.dim = dim
        ctx.length = x.shape[dim]
        return reduce_scatter_dim(x, group, dim=dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gather_sum(grad, ctx.group, dim=ctx.dim, length=ctx.length), None, None


def exchange_rows(
    x: torch.Tensor, group: ProcessGroup, *, sent: Sequence[int], received: Sequence[int]
) -> torch.Tensor:
    """Send rows to every rank of a group, and receive rows from every rank. Collective.

    The backward, which is also collective, sends the gradients of the rows back.

    Args:
        x: Rows [sum(sent), ...], ordered by the rank that receives them.
        group: The process group.
        sent: Number of rows for each rank.
        received: Number of rows that each rank sends to this one.

    Returns:
        Rows [sum(received), ...], ordered by the rank that sent them.
    """
    return _RowExchange.apply(x, group, tuple(sent), tuple(received))


def exchange_counts(counts: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Send row r of `counts` [ranks, n] to rank r, and return the rows for this rank. Collective.

    Returns:
        Counts [ranks, n], with one row from every rank.
    """
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: ProcessGroup,
        sent: tuple[int, ...],
        received: tuple[int, ...],
    ) -> torch.Tensor:
        ctx.group = group
        ctx.sent = sent
        ctx.received = received
        return _all_to_all(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        returned = exchange_rows(gradient, ctx.group, sent=ctx.received, received=ctx.sent)
        return returned, None, None, None


def _all_to_all(
    x: torch.Tensor, group: ProcessGroup, sent: tuple[int, ...], received: tuple[int, ...]
) -> torch.Tensor:
    output = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(output, x.contiguous(), list(received), list(sent), group=group)
    return output


class AsyncAllReduce:
    """All-reduce that starts when the object is created. Collective.

    Args:
        tensor: Tensor that is reduced in place.
        group: The process group, or None if there are no other ranks.
        op: The reduction.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> None:
        self._tensor = tensor
        self._work: dist.Work | None = None
        if group is not None:
            self._work = dist.all_reduce(tensor, op=op, group=group, async_op=True)

    def value(self) -> torch.Tensor:
        """Wait for the all-reduce and return the reduced tensor.

        Every rank must call this at least once.
        """
        if self._work is not None:
            with naming("all-reduce of a small value"):
                self._work.wait()
            self._work = None
        return self._tensor


class AsyncMaximum:
    """Maximum over ranks. Its all-reduce starts when the object is created. Collective.

    Creating the object does not wait for the device. `value` waits for the all-reduce, but not for
    kernels that are queued after the object was created.

    Args:
        number: This rank's number, from 0 to 255.
        device: Device of the group's tensors.
        group: The process group, or None if there are no other ranks.
    """

    def __init__(self, number: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        # `full` launches a kernel. A copy from the host would wait for the device.
        flag = torch.full((1,), number, dtype=torch.uint8, device=device)
        self._reduction = AsyncAllReduce(flag, group, dist.ReduceOp.MAX)
        if accelerator.is_accelerator(device):
            # On a device this makes the stream wait, so that the copy below follows the
            # all-reduce. It does not block this thread.
            self._reduction.value()
        self._flag = HostCopy(flag)

    def value(self) -> int:
        """Wait for the all-reduce and return the largest number of all ranks."""
        self._reduction.value()
        return int(self._flag.values())
