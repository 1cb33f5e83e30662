"""Buffers of gradients that are summed over a group while the backward runs.

This is the interface of the gradient reducer to communication. In every step the reducer fills a
buffer, calls `start`, and later `finish`, which leaves the sum in the buffer. All ranks start and
finish buffers in the same order, and all starts of a step precede its first finish.

The classes here use torch's asynchronous all-reduce, or an algorithm of several steps. Ranks on one
machine may use those of `comm.shared_memory`.
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
from plait.comm.algorithms import Name, Started, advance, launch, launched, sum_over


@dataclass(frozen=True)
class Flat:
    """Content of a buffer: tensors that follow each other.

    A buffer never mixes tensors for which `tp_local` differs. The position of an element decides in
    which order it is summed and with which other elements it is quantised. Tensors that are
    replicated over the tp dimension must get the same bits on all of its ranks, so their positions
    must not depend on the sizes of split tensors.

    Attributes:
        dtype: Dtype of the buffer.
        shapes: Shapes of the tensors.
        tp_local: Whether the tensors are shards of tensor parallelism.
    """

    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    tp_local: bool = False

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return sum(map(prod, self.shapes))

    @property
    def matrices(self) -> bool:
        """True if all tensors have two or more dimensions, so that they may be compressed."""
        return all(len(shape) > 1 for shape in self.shapes)


class Buckets(Protocol):
    """Buffers that are summed over a group. The module docstring has the order of calls."""

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Buffers of this rank, [n] each, initially zero."""

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """State that persists between steps, by name, for checkpoints."""

    def start(self, index: int) -> None:
        """Start the sum of a filled buffer. Nothing may use the buffer before `finish` returns."""

    def finish(self, index: int) -> None:
        """Wait until the buffer has the sum over all ranks."""


class GroupBuckets:
    """Buffers that are summed by torch's all-reduce."""

    def __init__(
        self, group: dist.ProcessGroup, flats: Sequence[Flat], device: torch.device
    ) -> None:
        self.buffers = [torch.zeros(flat.numel, dtype=flat.dtype, device=device) for flat in flats]
        self.state: dict[str, torch.Tensor] = {}
        self._group = group
        self._works: dict[int, dist.Work] = {}

    def start(self, index: int) -> None:
        """Start the all-reduce of a buffer."""
        work = dist.all_reduce(self.buffers[index], group=self._group, async_op=True)
        self._works[index] = launched(work)

    def finish(self, index: int) -> None:
        """Wait for the all-reduce of a buffer."""
        self._works.pop(index).wait()


class AlgorithmBuckets:
    """Buffers that are summed by an algorithm of `comm.algorithms`.

    The first step of each buffer overlaps with the backward. The first `finish` performs the
    remaining steps of all buffers in turn.
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
        self._sum = partial(sum_over, group=group, algorithm=algorithm, levels=levels)
        self._running: list[Started] = []

    def start(self, index: int) -> None:
        """Start the first step of a buffer's sum."""
        self._running.append(launch(self._sum(self.buffers[index])))

    def finish(self, index: int) -> None:
        """Finish the sums of all buffers that were started."""
        advance(self._running)
        self._running = []
