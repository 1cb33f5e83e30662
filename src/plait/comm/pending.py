"""Asynchronous all-reduce of a small tensor, overlapped with computation."""

from __future__ import annotations

import torch
import torch.distributed as dist

from plait.comm.failures import naming


class AsyncAllReduce:
    """All-reduce that starts when the object is created. Collective.

    Args:
        tensor: Tensor that is reduced in place.
        group: The process group. Without one the value is the tensor as it is.
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

        Every rank must call this at some time.
        """
        if self._work is not None:
            with naming("all-reduce of a small value"):
                self._work.wait()
            self._work = None
        return self._tensor
