"""Asynchronous maximum of a small number over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from plait.cluster import accelerator
from plait.cluster.host_copy import HostCopy


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
        self._work: dist.Work | None = None
        if group is not None:
            self._work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group, async_op=True)
            if accelerator.is_accelerator(device):
                # On a device this makes the stream wait, so that the copy below follows the
                # all-reduce. It does not block this thread.
                self._finish()
        self._flag = HostCopy(flag)

    def value(self) -> int:
        """Return the largest number of all ranks."""
        self._finish()
        return int(self._flag.values())

    def _finish(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
