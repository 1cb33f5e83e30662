"""Sums of flat buffers over a group, started as each is ready and finished later: what the gradient reducer needs of communication.

Every step: fill a buffer, `start` it, and `finish` it, which leaves the sum in it. All ranks start and finish in one order, all starts of a
step before its first finish. Three implementations: torch's asynchronous all-reduce, an algorithm of several steps, and memory that the
ranks of one machine share.
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
from plait.comm.board import described
from plait.comm.host import Host, Memory
from plait.comm.record import record
from plait.comm.summing import add_in_order


@dataclass(frozen=True)
class Flat:
    """What a buffer holds: tensors of these shapes, one after the other."""

    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    tp_local: bool = False
    """Whether they are parts that tensor parallelism split. Others must have the same bits on every rank of the tp axis, so a buffer never
    holds both: where an element sits decides in which order it is summed and with which others it is quantized."""

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

    def __init__(self, group: dist.ProcessGroup, flats: Sequence[Flat], device: torch.device) -> None:
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
    """By one of `comm.algorithms`: the first step of each overlaps with the backward, the others follow in `finish`, in turn."""

    def __init__(
        self, group: dist.ProcessGroup, flats: Sequence[Flat], device: torch.device, *, algorithm: Name, levels: Levels | None = None
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


class SharedBuckets:
    """In memory that the ranks of one machine share: every rank sums one part of a buffer over all ranks, in their order, and writes it
    into all of them. Nothing is copied, and the sum has the same bits on every rank.

    No thread works in the background. A rank does its part when it comes by (at another `start`, or in `finish`) and finds that the others
    are ready, so ranks do not wait for each other before the end.
    """

    def __init__(self, host: Host, flats: Sequence[Flat]) -> None:
        """Collective. Raises Unavailable where memory is short, on all ranks."""
        starts, total = [], 0
        for flat in flats:
            starts.append(total)
            total += -(-flat.numel * flat.dtype.itemsize // 128) * 128
        self.state: dict[str, torch.Tensor] = {}
        self._host = host
        self._memory = memory = Memory(host, words=2 * len(flats), data_bytes=host.ranks * total)
        self._pieces = [
            [memory.tensor(rank * total + start, flat.numel, flat.dtype) for rank in range(host.ranks)]
            for start, flat in zip(starts, flats, strict=True)
        ]
        """By buffer, then by rank."""
        self.buffers = [pieces[host.rank] for pieces in self._pieces]
        for buffer in self.buffers:
            buffer.zero_()  # also places the pages near this rank
        self._shapes = [described([flat.numel], flat.dtype) for flat in flats]
        self._calls = [0] * len(flats)
        """How often each buffer was started."""
        self._waiting: list[int] = []
        """Started here and not yet summed here, in order."""

    def start(self, index: int) -> None:
        """See Buckets."""
        self._calls[index] += 1
        self._memory.write(2 * index, self._calls[index])
        self._waiting.append(index)
        self._go_on()

    def finish(self, index: int) -> None:
        """See Buckets."""
        while index in self._waiting:
            self._wait(self._waiting[0], 0)
            self._go_on()
        self._wait(index, 1)
        whole = self.buffers[index]
        record("all_reduce", full_bytes=whole.numel() * whole.element_size(), dtype=whole.dtype, ranks=self._host.ranks)

    def _wait(self, index: int, word: int) -> None:
        shape = self._shapes[index]
        self._host.wait(partial(self._late, index, word), operation="all-reduce", sequence=self._calls[index], shape=shape)

    def _go_on(self) -> None:
        while self._waiting and not self._late(self._waiting[0], 0):
            self._sum(self._waiting.pop(0))

    def _sum(self, index: int) -> None:
        memory, host, pieces = self._memory, self._host, self._pieces[index]
        numel = pieces[0].numel()
        part = -(-numel // (host.ranks * 32)) * 32  # whole cache lines, so that ranks do not disturb each other
        start, stop = min(numel, host.rank * part), min(numel, (host.rank + 1) * part)
        mine = [piece[start:stop] for piece in pieces]
        add_in_order(mine, mine)
        memory.write(2 * index + 1, self._calls[index])

    def _late(self, index: int, word: int) -> list[int]:
        """Ranks that have not started (word 0) or not summed (word 1) this call of a buffer."""
        return self._memory.behind(2 * index + word, self._calls[index])
