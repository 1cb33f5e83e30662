"""Prefetching of parameter shards that are stored in files.

A training step gathers its units in the same order every time, so the unit that followed an
all-gather in the previous step is prefetched: in forward, in backward and between the two. A shard
is evicted as soon as the all-gather has read it. A changed order costs needless reads and never a
wrong result, because the files are mapped.
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
"""(moment, the unit gathered before or None, this unit)."""


class ShardPrefetcher:
    """Prefetches the shards of a sharded model from an arena.

    Shards take at most `pool_bytes` of memory at once, or as much as the one unit that is gathered,
    if that is more.
    """

    def __init__(
        self,
        arena: Arena,
        units: Sequence[FSDPModule],
        *,
        pool_bytes: int,
        reader: ThreadPoolExecutor,
    ) -> None:
        """Register with the all-gathers of all units.

        Args:
            arena: The arena of the shards.
            units: The units of the model.
            pool_bytes: Memory for shards, those of the gathered unit included.
            reader: A pool of one thread, which runs its tasks in order.
        """
        self._arena = arena
        self._shards = [shard_buffers(unit) for unit in units]
        self._sizes = []
        for shards in self._shards:
            self._sizes.append(sum(shard.numel() * shard.element_size() for shard in shards))
        self._pool_bytes = pool_bytes
        self._reader = reader
        self._follows: dict[_Gather, tuple[Moment, int] | None] = {}
        """All-gather that last followed each all-gather, or None at the end of a step."""
        self._last: _Gather | None = None
        self._ahead: dict[int, Future[None]] = {}
        """Units that are in memory or being read, except for the one that is gathered."""
        self._stays = False
        """True if the unit that is gathered now is also gathered next, so it stays in memory."""
        for index, unit in enumerate(units):
            on_shard_reads(unit, partial(self._before, index), partial(self._after, index))

    def end_step(self) -> None:
        """Evict the prefetched shards, because the next all-gather may be far away."""
        if self._last is not None:
            self._follows[self._last] = None
        self._last = None
        for unit in list(self._ahead):
            self._drop(unit)

    def _before(self, unit: int, when: Moment) -> None:
        previous_unit = None
        if self._last is not None:
            self._follows[self._last] = (when, unit)
            previous_unit = self._last[2]
        self._last = (when, previous_unit, unit)
        read = self._ahead.pop(unit, None) or self._fetch(unit)
        # The next reads are queued before the wait for this one, so that the thread goes on.
        self._prefetch(unit)
        read.result()

    def _after(self, unit: int) -> None:
        if self._stays:
            return
        for shard in self._shards[unit]:
            self._arena.evict(shard, written=False)

    def _prefetch(self, current: int) -> None:
        """Start to read the units that will be gathered next, as many as the pool has room for."""
        room = self._pool_bytes - self._sizes[current]
        next_units: list[int] = []
        gather = self._last
        self._stays = False
        while gather is not None:
            following = self._follows.get(gather)
            if following is None:
                break
            when, unit = following
            if unit == current and not next_units:
                self._stays = True
            elif unit == current or unit in next_units or self._sizes[unit] > room:
                break
            else:
                room -= self._sizes[unit]
                next_units.append(unit)
            gather = (when, gather[2], unit)

        for unit in [unit for unit in self._ahead if unit not in next_units]:
            self._drop(unit)
        for unit in next_units:
            if unit not in self._ahead:
                self._ahead[unit] = self._fetch(unit)
        if self._stays:
            # It stays in memory, so the next all-gather finds a read that is complete.
            done: Future[None] = Future()
            done.set_result(None)
            self._ahead[current] = done

    def _fetch(self, unit: int) -> Future[None]:
        def fetch() -> None:
            for shard in self._shards[unit]:
                self._arena.fetch(shard, write=False)

        return self._reader.submit(fetch)

    def _drop(self, unit: int) -> None:
        """Queue the eviction of a unit behind its read, which may still be running."""

        def evict() -> None:
            for shard in self._shards[unit]:
                self._arena.evict(shard, written=False)

        del self._ahead[unit]
        self._reader.submit(evict)
