"""Zero-copy all-gather: the parameters of one sharded unit in memory that the ranks of a machine share. The shard of a rank is a range of
its rows.

An all-gather moves nothing: a rank marks its rows as written and waits for the others. No rank changes rows that others still read: an
update follows the reduction of a step's gradients, to which every rank contributes after its last read; and parameters that were gathered
for a pass without gradients are released by all ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch

from plait.comm.host import Host, Memory
from plait.comm.record import record

_WRITTEN, _READ = 0, 1
"""Indices of the words that say how many gatherings a rank has written its rows for, and has finished reading."""


class HostParameters:
    """A unit of `fully_shard` in shared memory. Every rank gathers it in the same order as the others, as with any collective."""

    def __init__(self, host: Host, numels: Sequence[int], dtype: torch.dtype) -> None:
        """Collective over the host's group. `numels`: elements of every parameter's shard, padding included, the same on all ranks. Raises
        Unavailable where there is no memory for it."""
        size = dtype.itemsize
        spaces = [-(-host.ranks * numel * size // 64) * 64 for numel in numels]
        *starts, total = accumulate(spaces, initial=0)
        self._host, self._dtype = host, dtype
        self._memory = Memory(host, words=2, data_bytes=total)
        self.wholes = [self._memory.tensor(start, host.ranks * numel, dtype) for start, numel in zip(starts, numels, strict=True)]
        """[ranks x numel] of every parameter."""
        self.rows = [self._memory.tensor(start + host.rank * n * size, n, dtype) for start, n in zip(starts, numels, strict=True)]
        """[numel] of every parameter: this rank's."""
        self._bytes = host.ranks * sum(numels) * size
        self._round = 0

    def begin(self) -> None:
        """This rank's rows are written."""
        self._round += 1
        self._memory.write(_WRITTEN, self._round)
        record("all_gather", full_bytes=self._bytes, dtype=self._dtype, ranks=self._host.ranks)

    def finish(self) -> None:
        """Return when everyone's rows are written."""
        self._wait(_WRITTEN, "all-gather")

    def release(self) -> None:
        """This rank has finished reading; returns when all ranks have."""
        self._memory.write(_READ, self._round)
        self._wait(_READ, "end of an evaluation")

    def _wait(self, word: int, operation: str) -> None:
        self._host.wait(partial(self._memory.behind, word, self._round), operation=operation, sequence=self._round)
