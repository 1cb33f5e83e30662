"""Exposed communication time of a process, by collective and axis: the time that computation did not hide, measured by the host's clock
around each wait.

It is valid for tensors on the CPU, whose collectives block the thread that waits for them. On a GPU a wait is queued on a stream and
returns at once, so nothing is counted there. A wait for a slower rank counts like a wait for a slow link.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from plait._torch.flat_collectives import all_gather_single
from plait._torch.units import AllGather, ReduceScatter


class Waits:
    """Sums since the last `take`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Count the time inside under `what`: `all_reduce dp_replicate`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] = self._seconds.get(what, 0.0) + time.perf_counter() - began

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """Leave out what is counted inside, also where it ends by an error."""
        before = self._seconds
        self._seconds = {}
        try:
            yield
        finally:
            self._seconds = before

    def take(self) -> dict[str, float]:
        """What was counted, and begin anew."""
        found, self._seconds = self._seconds, {}
        return found


class TimedAllGather(AllGather):
    """For a unit of `fully_shard`: its all-gather, counted. `inner` None is torch's own."""

    def __init__(self, inner: AllGather | None, waits: Waits, axis: str) -> None:
        self._inner, self._waits, self._what = inner, waits, f"all_gather {axis}"

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As the inner one does."""
        if self._inner is None:
            return torch.empty(*size, dtype=dtype, device=device)
        return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False) -> Any:
        """As the inner one does."""
        with self._waits.during(self._what):
            if self._inner is None:
                return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
            return self._inner(output_tensor, input_tensor, group, async_op)


class TimedReduceScatter(ReduceScatter):
    """The same for its reduce-scatter."""

    def __init__(self, inner: ReduceScatter, waits: Waits, axis: str) -> None:
        self._inner, self._waits, self._what = inner, waits, f"reduce_scatter {axis}"

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As the inner one does, which may wait until other ranks have read what was there."""
        with self._waits.during(self._what):
            return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """As the inner one does."""
        with self._waits.during(self._what):
            return self._inner(output_tensor, input_tensor, group, op, async_op)
