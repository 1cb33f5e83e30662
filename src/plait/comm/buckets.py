"""Sums of flat buffers over a group, started as each is ready and finished later: what the gradient
reducer needs of communication.

Every step: fill a buffer, `start` it, and `finish` it, which leaves the sum in it. All ranks start
and finish in one order, all starts of a step before its first finish. Here are torch's asynchronous
all-reduce and an algorithm of several steps; `comm.shared_memory` has the sums of ranks on one
machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist

from plait.cluster.mesh import Levels
from plait.comm.algorithms import Name, Started, advance, launch, sum_over


@dataclass(frozen=True)
class Flat:
    """What a buffer holds: tensors of these shapes, one after the other."""

    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    tp_local: bool = False
    """Whether they are parts that tensor parallelism split. Others must have the same bits on every
    rank of the tp axis, so a buffer never holds both: where an element sits decides in which order
    it is summed and with which others it is quantized.
    """

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return sum(map(prod, self.shapes))

    @property
    def matrices(self) -> bool:
        """Whether all of it has two dimensions or more, so that it may be compressed."""
        return all(len(shape) > 1 for shape in self.shapes)


class Buckets(Protocol):
    """See the module."""

    @property
    def buffers(self) -> list[torch.Tensor]:
        """This rank's, [n] each, zero at first."""

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """What is kept from step to step, by name; for a checkpoint."""

    def start(self, index: int) -> None:
        """This rank's buffer is ready; nothing may touch it until it is finished."""

    def finish(self, index: int) -> None:
        """Return when the buffer holds the sum over all ranks."""


class GroupBuckets:
    """By torch's all-reduce, overlapped with the backward."""

    def __init__(
        self, group: dist.ProcessGroup, flats: Sequence[Flat], device: torch.device
    ) -> None:
        self.buffers = [torch.zeros(flat.numel, dtype=flat.dtype, device=device) for flat in flats]
        self.state: dict[str, torch.Tensor] = {}
        self._group = group
        self._works: dict[int, dist.Work] = {}

    def start(self, index: int) -> None:
        """See Buckets."""
        work = dist.all_reduce(self.buffers[index], group=self._group, async_op=True)
        assert work is not None
        self._works[index] = work

    def finish(self, index: int) -> None:
        """See Buckets."""
        self._works.pop(index).wait()


class AlgorithmBuckets:
    """By one of `comm.algorithms`: the first step of each overlaps with the backward, the others
    follow in `finish`, in turn.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        flats: Sequence[Flat],
        device: torch.device,
        *,
        algorithm: Name,
        levels: Levels | None = None,
    ) -> None:
        self.buffers = [torch.zeros(flat.numel, dtype=flat.dtype, device=device) for flat in flats]
        self.state: dict[str, torch.Tensor] = {}
        self._start = partial(sum_over, group=group, algorithm=algorithm, levels=levels)
        self._running: list[Started] = []

    def start(self, index: int) -> None:
        """See Buckets."""
        self._running.append(launch(self._start(self.buffers[index])))

    def finish(self, index: int) -> None:
        """See Buckets."""
        advance(self._running)
        self._running = []
