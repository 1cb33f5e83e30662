"""A small number that ranks agree about while they go on: the largest of all ranks' own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from plait.cluster import accelerator


class Largest:
    """Of whole numbers from 0 to 255, one a rank. Made on every rank; ask for the value later. Neither waits for what a device was given
    after it was made."""

    def __init__(self, number: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """`group` None: there are no other ranks."""
        self._flag = torch.full((1,), number, dtype=torch.uint8, device=device)  # a kernel: a copy would wait
        self._wait: Callable[[], object] = _nothing
        if group is None:
            return
        work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        if not accelerator.is_one(device):
            self._wait = work.wait
            return
        work.wait()  # the stream does, not this thread
        self._flag = torch.empty(1, dtype=torch.uint8, pin_memory=True).copy_(self._flag, non_blocking=True)
        self._wait = accelerator.current_stream(device).record_event().synchronize

    def value(self) -> int:
        """The largest."""
        self._wait()
        return int(self._flag)


def _nothing() -> None:
    pass
