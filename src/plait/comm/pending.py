"""An asynchronous all-reduce of a small tensor, overlapped with computation."""

from __future__ import annotations

import torch
import torch.distributed as dist

from plait.comm.failures import naming


class Pending:
    """An all-reduce that begins now and is waited for when its value is asked for. Ask on every
    rank, sooner or later.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> None:
        """`tensor` is reduced in place; without a group it is what it is."""
        self._tensor = tensor
        self._work = (
            dist.all_reduce(tensor, op=op, group=group, async_op=True)
            if group is not None
            else None
        )

    def value(self) -> torch.Tensor:
        """The tensor, reduced."""
        if self._work is not None:
            with naming("all-reduce of a small value"):
                self._work.wait()
            self._work = None
        return self._tensor
