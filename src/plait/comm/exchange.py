"""An all-to-all of rows with other numbers for every rank, and its adjoint: the rows' gradients
return the way they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def exchange_rows(
    x: torch.Tensor, group: ProcessGroup, *, sent: Sequence[int], received: Sequence[int]
) -> torch.Tensor:
    """The first `sent[0]` rows of `x` [rows, ...] go to the group's rank 0, the next `sent[1]` to
    rank 1, and so on; returns what arrives, `received[r]` rows of each rank r, in the order of
    ranks. Collective, and so is its backward.
    """
    return _Exchange.apply(x, group, tuple(sent), tuple(received))


def exchange_counts(counts: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """`counts` [ranks, n]: a row for each rank; returns [ranks, n], the rows that the ranks have
    for this one. Collective.
    """
    found = torch.empty_like(counts)
    dist.all_to_all_single(found, counts.contiguous(), group=group)
    return found


class _Exchange(torch.autograd.Function):
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
        return _exchanged(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(gradient, ctx.group, ctx.received, ctx.sent), None, None, None


def _exchanged(
    x: torch.Tensor, group: ProcessGroup, sent: tuple[int, ...], received: tuple[int, ...]
) -> torch.Tensor:
    found = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(found, x.contiguous(), list(received), list(sent), group=group)
    return found
