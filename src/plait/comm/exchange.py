"""Differentiable all-to-all of rows, with a different number of rows for every pair of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def exchange_rows(
    x: torch.Tensor, group: ProcessGroup, *, sent: Sequence[int], received: Sequence[int]
) -> torch.Tensor:
    """Send rows to every rank of a group, and receive rows from every rank. Collective.

    The backward sends the gradients of the rows back, and is collective too.

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
        return _all_to_all(gradient, ctx.group, ctx.received, ctx.sent), None, None, None


def _all_to_all(
    x: torch.Tensor, group: ProcessGroup, sent: tuple[int, ...], received: tuple[int, ...]
) -> torch.Tensor:
    output = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(output, x.contiguous(), list(received), list(sent), group=group)
    return output
