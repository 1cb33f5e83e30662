"""Asynchronous all-reduces of small tensors, overlapped with computation."""

from __future__ import annotations

import torch
import torch.distributed as dist

from plait.cluster import accelerator
from plait.cluster.host_copy import HostCopy
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


class AsyncMaximum:
    """Maximum over ranks that is computed while they continue. Collective.

    Neither the creation nor `value` waits for kernels that are queued after the creation.

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
        """Return the largest number of all ranks."""
        self._reduction.value()
        return int(self._flag.values())
