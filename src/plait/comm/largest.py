"""A small number that ranks agree about while they go on: the largest of all ranks' own."""

from __future__ import annotations

import torch
import torch.distributed as dist

from plait.cluster import accelerator
from plait.cluster.host_copy import HostCopy


class Largest:
    """Of whole numbers from 0 to 255, one a rank. Made on every rank; ask for the value later.
    Neither waits for what a device was given after it was made.
    """

    def __init__(self, number: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """`group` None: there are no other ranks."""
        # a kernel: a copy would wait
        flag = torch.full((1,), number, dtype=torch.uint8, device=device)
        self._work: dist.Work | None = None
        if group is not None:
            self._work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group, async_op=True)
            if accelerator.is_one(device):
                self._finish()  # the stream waits, not this thread
        self._flag = HostCopy(flag)

    def value(self) -> int:
        """The largest."""
        self._finish()
        return int(self._flag.values())

    def _finish(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
