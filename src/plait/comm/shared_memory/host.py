"""Shared memory and waits of process groups whose ranks all run on one machine.

Memory is an anonymous file (`memfd`) that one rank creates and the others open through `/proc`. It
has no name, so a killed run leaves nothing behind, and it does not count against the size of
`/dev/shm`. If every rank reads the random bytes that the first one wrote, the ranks share a
machine. Host names prove nothing. If they do not share one, all ranks raise `Unavailable`.
Only x86-64 is supported, because ranks rely on its order of stores.
"""

from __future__ import annotations

import math
import mmap
import os
import platform
import secrets
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from plait._torch.groups import timeout_of
from plait.cluster.host_memory import free_host_bytes
from plait.comm import stacks
from plait.comm.board import Wait
from plait.comm.watch import WATCH
from plait.errors import CommunicationError
from plait.files import anonymous_file
from plait.units import format_bytes

_PAGE = 4096
_NONCE_BYTES = 32
_YIELDING_SECONDS = 500e-6
"""A wait yields the core for this time before it sleeps. Waking up costs about 100 microseconds."""
_SHARE_OF_FREE_MEMORY = 0.5
"""Largest fraction of the free host memory that one allocation shares."""


class Unavailable(Exception):
    """Raised if memory cannot be shared, on every rank of the group or on none.

    The message is the reason.
    """


class Host:
    """A group whose ranks all run on this machine."""

    def __init__(self, group: dist.ProcessGroup, *, label: str) -> None:
        """Check that all ranks of `group` run on this machine. Collective over `group`.

        Args:
            group: The process group.
            label: Name of the group in errors, such as `dp_shard`.

        Raises:
            Unavailable: They do not, or the platform is not supported.
        """
        self.group = group
        self.label = label
        self.ranks, self.rank = group.size(), group.rank()
        self.timeout_seconds = timeout_of(group)
        self._global_ranks = dist.get_process_group_ranks(group)
        _agree(group, _unsupported())
        Memory(self, words=1, data_bytes=0)  # raises Unavailable unless the ranks share a machine
        self._pids: list[tuple[int, int]] = [(0, 0)] * self.ranks
        dist.all_gather_object(
            self._pids, (os.getpid(), os.stat("/proc/self/ns/pid").st_ino), group=group
        )
        self._sees_processes = len({namespace for _, namespace in self._pids}) == 1

    def name(self, rank: int) -> str:
        """Return `rank N` for errors, where N is the global rank of a rank of the group."""
        return f"rank {self._global_ranks[rank]}"

    def wait(
        self, late: Callable[[], list[int]], *, operation: str, sequence: int = 0, shape: str = ""
    ) -> None:
        """Return when no rank is missing. Yield the core at first and sleep later.

        A busy loop would take the core from the ranks that are missing: there may be more ranks
        than cores.

        Args:
            late: Returns the ranks of the group that are still missing.
            operation: Name of the collective, for messages.
            sequence: Number of the collective within the group, for messages.
            shape: Shape and dtype of the tensor, for messages.

        Raises:
            CommunicationError: A missing rank has ended, or the group's deadline has passed. The
                message names the ranks and the operation.
        """
        began = time.monotonic()
        while late():
            os.sched_yield()
            if time.monotonic() - began > _YIELDING_SECONDS:
                break
        missing = late()
        if missing:
            wait = Wait(
                operation,
                self.label,
                began,
                sequence,
                shape,
                self._names(missing),
                tuple(self._global_ranks),
            )
            with WATCH.waiting(wait):
                self._wait_on(late, wait)

    def _wait_on(self, late: Callable[[], list[int]], wait: Wait) -> None:
        """Sleep until no rank is missing, and publish `wait` meanwhile."""
        checked = wait.since
        pause = 20e-6
        while late():
            time.sleep(pause)
            pause = min(pause * 1.5, 200e-6)
            now = time.monotonic()
            if now - checked > 0.05:
                checked = now
                missing = self._names(self._check(late, wait.operation, waited=now - wait.since))
                if missing and missing != wait.missing:
                    wait = replace(wait, missing=missing)
                    WATCH.again(wait)

    def _names(self, ranks: list[int]) -> tuple[int, ...]:
        """Return global ranks."""
        return tuple(self._global_ranks[rank] for rank in ranks)

    def _check(self, late: Callable[[], list[int]], operation: str, *, waited: float) -> list[int]:
        """Return the ranks that are missing. Raises CommunicationError as `wait` does."""
        ended = self._ended()
        missing = late()  # after `_ended`, so that the last words of a rank that ended count
        dead = [rank for rank in missing if rank in ended]
        me = self.name(self.rank)
        if dead:
            names = ", ".join(f"{self.name(rank)} (process {self._pids[rank][0]})" for rank in dead)
            raise CommunicationError(
                f"{operation} over {self.label}: {names} ended while {me} waited for it; the first"
                " failure is there"
            )
        if missing and waited > self.timeout_seconds:
            names = ", ".join(self.name(rank) for rank in missing)
            raise CommunicationError(
                f"{operation} over {self.label}: {me} waited {waited:.0f} s for {names}, which runs"
                " and did not take part; it is stuck or issues other collectives"
            )
        return missing

    def _ended(self) -> set[int]:
        if not self._sees_processes:  # only the deadline ends a wait
            return set()
        return {
            rank for rank, (pid, _) in enumerate(self._pids) if stacks.state(pid) in stacks.ENDED
        }


class Memory:
    """Bytes and counters that every rank of a `Host` reads and writes.

    `words` [ranks, width] of int64 start at 0, and a rank writes only its own row. On x86-64 a rank
    that sees a word also sees everything that was written before it. The memory is freed when no
    tensor of any rank points into it.
    """

    def __init__(self, host: Host, *, words: int, data_bytes: int) -> None:
        """Allocate memory. Collective over the host's group, with equal arguments on all ranks.

        Args:
            host: The ranks.
            words: Number of words per rank.
            data_bytes: Size of the bytes that `tensor` returns ranges of.

        Raises:
            Unavailable: A rank cannot map the memory, or it takes too much of what is free.
        """
        self._ranks = host.ranks
        # whole pairs of cache lines, so that ranks do not disturb each other
        self._row = math.ceil(words / 16) * 16
        start = _pages(_NONCE_BYTES)
        self._data_start = start + _pages(host.ranks * self._row * 8)
        # an empty tensor at the end points at one element
        total = self._data_start + _pages(data_bytes + 64)
        descriptor, offer = _offer(total) if host.rank == 0 else (None, None)
        offers = [offer]
        dist.broadcast_object_list(offers, group_src=0, group=host.group)
        mapped, problem = _open(offers[0], total)
        try:
            # Also a barrier: the first rank closes its descriptor after all ranks have opened it.
            _agree(host.group, problem)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        assert mapped is not None
        self._mapped = mapped
        self.words = memoryview(mapped)[start : start + host.ranks * self._row * 8].cast("q")
        self._mine = host.rank * self._row

    def read(self, rank: int, index: int) -> int:
        """Return a word of any rank of the group."""
        return int(self.words[rank * self._row + index])

    def write(self, index: int, value: int) -> None:
        """Set a word of this rank."""
        self.words[self._mine + index] = value

    def behind(self, index: int, count: int) -> list[int]:
        """Return the ranks whose word, a counter, has not reached `count`."""
        return [rank for rank in range(self._ranks) if self.read(rank, index) < count]

    def tensor(
        self,
        offset: int,
        numel: int,
        dtype: torch.dtype,
        on_release: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Return a range of the bytes as a tensor [numel].

        Args:
            offset: First byte.
            numel: Number of elements.
            dtype: Their dtype.
            on_release: Called when no tensor of this rank points to the range any more.
        """
        start = self._data_start + offset
        window = memoryview(self._mapped)[start : start + max(numel, 1) * dtype.itemsize]
        if on_release is not None:
            weakref.finalize(window, on_release).atexit = False
        return torch.frombuffer(window, dtype=dtype, count=max(numel, 1))[:numel]


def _agree(group: dist.ProcessGroup, problem: str | None) -> None:
    """Raise Unavailable on every rank if any has a problem."""
    problems: list[str | None] = [None] * group.size()
    dist.all_gather_object(problems, problem, group=group)
    first = next(((rank, text) for rank, text in enumerate(problems) if text is not None), None)
    if first is not None:
        raise Unavailable(f"rank {dist.get_global_rank(group, first[0])}: {first[1]}")


def _unsupported() -> str | None:
    if sys.platform != "linux":
        return f"shared memory is for Linux, this is {sys.platform}"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"shared memory relies on the memory order of x86-64, this is {platform.machine()}"
    return None


def _offer(total: int) -> tuple[int | None, tuple[str, bytes] | str]:
    """Return (descriptor, (path, nonce)) of a new anonymous file, or (None, reason)."""
    free = free_host_bytes()
    if free is not None and total > free * _SHARE_OF_FREE_MEMORY:
        return None, f"{format_bytes(total)} to share, and {format_bytes(free)} of memory are free"
    try:
        descriptor = anonymous_file("plait")
    except OSError as error:
        return None, f"memory that processes share: {error.strerror}"
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        os.ftruncate(descriptor, total)
        os.pwrite(descriptor, nonce, 0)
    except OSError as error:
        os.close(descriptor)
        return None, f"{format_bytes(total)} of shared memory: {error.strerror}"
    return descriptor, (f"/proc/{os.getpid()}/fd/{descriptor}", nonce)


def _open(offer: tuple[str, bytes] | str | None, total: int) -> tuple[mmap.mmap | None, str | None]:
    """Return (mapping, None), or (None, reason)."""
    if not isinstance(offer, tuple):
        return None, offer or "the first rank shares no memory"
    path, nonce = offer
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        where = "it runs on another machine, in another container or as another user"
        return None, f"the first rank's memory cannot be opened ({error.strerror}); {where}"
    try:
        if os.fstat(descriptor).st_size != total or os.pread(descriptor, _NONCE_BYTES, 0) != nonce:
            return (
                None,
                (
                    "what it opened is not the first rank's memory; it runs on another machine or"
                    " in another container"
                ),
            )
        return mmap.mmap(descriptor, total), None
    except OSError as error:
        return None, f"the first rank's memory cannot be mapped ({error.strerror})"
    finally:
        os.close(descriptor)


def _pages(count: int) -> int:
    return math.ceil(count / _PAGE) * _PAGE
