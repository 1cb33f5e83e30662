"""Slots of shared memory that grow with what is asked of them: what the collectives of `host_gather` and `host_scatter` are built on.

They decide which slot is free, and which rank may use it when. All ranks ask for the same sizes in one order, so they grow together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from plait.comm.host import Host, Memory, Unavailable
from plait.errors import CommunicationError


class HostSlots:
    """`words` of each rank for agreement, and `slots` of equal size."""

    def __init__(self, host: Host, *, words: int, slots: int) -> None:
        self._host = host
        self._words, self._slots = words, slots
        self._memory: Memory | None = None
        self._slot_bytes = 0
        self._too_large: int | None = None
        """Requests of this many bytes or more were refused: memory was short."""

    def _renewed(self) -> None:
        """There is new memory, in which nothing is used yet."""
        raise NotImplementedError

    def _fits(self, count: int) -> bool:
        return self._memory is not None and count <= self._slot_bytes

    def _make_room(self, count: int) -> None:
        """Collective where a call is larger than any before."""
        if self._fits(count) or (self._too_large is not None and count >= self._too_large):
            return
        slot_bytes = -(-count // 64) * 64
        try:
            memory = Memory(self._host, words=self._words, data_bytes=self._slots * slot_bytes)
        except Unavailable:
            self._too_large = count
            return
        self._memory, self._slot_bytes = memory, slot_bytes
        self._renewed()

    def _slot(self, index: int, numel: int, dtype: torch.dtype, released: Callable[[], None]) -> torch.Tensor:
        """[numel] at the start of a slot. `released` is called when no tensor points into it any more, unless the memory was renewed."""
        memory = self._memory
        assert memory is not None

        def release() -> None:
            if self._memory is memory:
                released()

        return memory.tensor(index * self._slot_bytes, numel, dtype, release)

    def _same_everywhere(self, word: int, count: int, *, operation: str, does: str) -> None:
        """Raise CommunicationError unless all ranks wrote `count` in a word."""
        memory, host = self._memory, self._host
        assert memory is not None
        other = next((rank for rank in range(host.ranks) if memory.read(rank, word) != count), None)
        if other is not None:
            theirs = memory.read(other, word)
            raise CommunicationError(
                f"{operation} over {host.label}: {host.name(other)} {does} {theirs} bytes and {host.name(host.rank)} {count}; "
                "the ranks issue different collectives"
            )
