"""Shards of parameters in files: prefetched for the unit that will be gathered, evicted as soon as
the all-gather has read them.

A training step gathers its units in the same order every time, so the unit that followed an
all-gather in the previous step is prefetched: in forward, in backward and between the two. A
changed order costs needless reads and never a wrong result: the files are mapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from torch.distributed.fsdp import FSDPModule

from plait._torch.gathering import Moment, on_shard_reads
from plait._torch.units import shard_buffers
from plait.parallel.offload.arena import Arena

_Gather = tuple[Moment, int | None, int]
"""(when, the unit gathered before, this unit)."""


class ShardReader:
    """Between the units of a sharded model and the arena that holds their shards. Shards take at
    most `pool_bytes` of memory at once, or as much as the one unit that is gathered, if that is
    more.
    """

    def __init__(
        self,
        arena: Arena,
        units: Sequence[FSDPModule],
        *,
        pool_bytes: int,
        reader: ThreadPoolExecutor,
    ) -> None:
        """`reader` must be one thread: what it is told is done in order."""
        self._arena = arena
        self._shards = [shard_buffers(unit) for unit in units]
        self._sizes = [
            sum(shard.numel() * shard.element_size() for shard in shards) for shards in self._shards
        ]
        self._pool_bytes = pool_bytes
        self._reader = reader
        self._follows: dict[_Gather, tuple[Moment, int] | None] = {}
        """What came after a gather when it was last seen; None: the end of a step."""
        self._last: _Gather | None = None
        self._ahead: dict[int, Future[None]] = {}
        """Units that are in memory or being read, besides the one that is gathered."""
        self._kept = False
        """Whether the unit that is gathered is gathered again next."""
        for index, unit in enumerate(units):
            on_shard_reads(unit, partial(self._before, index), partial(self._after, index))

    def end_step(self) -> None:
        """No all-gather follows for now: evict what was prefetched."""
        if self._last is not None:
            self._follows[self._last] = None
        self._last = None
        for unit in list(self._ahead):
            self._drop(unit)

    def _before(self, unit: int, when: Moment) -> None:
        if self._last is not None:
            self._follows[self._last] = (when, unit)
        self._last = (when, self._last[2] if self._last is not None else None, unit)
        arriving = self._ahead.pop(unit, None) or self._fetch(unit)
        self._read_ahead(unit)
        arriving.result()

    def _after(self, unit: int) -> None:
        if self._kept:
            return
        for shard in self._shards[unit]:
            self._arena.evict(shard, written=False)

    def _read_ahead(self, current: int) -> None:
        room = self._pool_bytes - self._sizes[current]
        wanted: list[int] = []
        at = self._last
        self._kept = False
        while at is not None:
            following = self._follows.get(at)
            if following is None:
                break
            when, unit = following
            if unit == current and not wanted:
                self._kept = True
            elif unit == current or unit in wanted or self._sizes[unit] > room:
                break
            else:
                room -= self._sizes[unit]
                wanted.append(unit)
            at = (when, at[2], unit)
        for unit in [unit for unit in self._ahead if unit not in wanted]:
            self._drop(unit)
        for unit in wanted:
            if unit not in self._ahead:
                self._ahead[unit] = self._fetch(unit)
        if self._kept:  # it stays, and is there when it is asked for
            done: Future[None] = Future()
            done.set_result(None)
            self._ahead[current] = done

    def _fetch(self, unit: int) -> Future[None]:
        def fetch() -> None:
            for shard in self._shards[unit]:
                self._arena.fetch(shard, write=False)

        return self._reader.submit(fetch)

    def _drop(self, unit: int) -> None:
        """Behind the reading of it, which may still go on."""

        def evict() -> None:
            for shard in self._shards[unit]:
                self._arena.evict(shard, written=False)

        del self._ahead[unit]
        self._reader.submit(evict)
