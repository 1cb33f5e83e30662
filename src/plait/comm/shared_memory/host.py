"""Shared memory and waits of process groups whose ranks all run on one machine.

Memory is an anonymous file (`memfd`) that one rank creates and the others open through `/proc`. It
has no name, so a killed run leaves nothing behind, and the limit of `/dev/shm` does not apply. The
ranks share a machine if all of them read the random bytes that the first rank has written. Host
names would not prove this. If the ranks do not share a machine, all raise
`SharedMemoryUnavailable`. Only x86-64 is supported, because ranks rely on its order of stores.
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
from plait.cluster.small_messages import all_gather_objects, broadcast_object
from plait.comm import stacks
from plait.comm.hang import Wait
from plait.comm.watch import WATCH
from plait.errors import CommunicationError
from plait.files import anonymous_file
from plait.sizes import format_bytes

_PAGE = 4096
_NONCE_BYTES = 32
_YIELDING_SECONDS = 500e-6
"""Time for which a wait yields the core before it sleeps.

Waking up from sleep takes about 100 microseconds.
"""
_FIRST_PAUSE_SECONDS = 20e-6
_LONGEST_PAUSE_SECONDS = 200e-6
_CHECK_SECONDS = 0.05
"""Interval at which a wait checks whether late ranks have ended."""
_SHARE_OF_FREE_MEMORY = 0.5
"""Largest fraction of the free host memory that one allocation shares."""


class SharedMemoryUnavailable(Exception):
    """Raised if ranks cannot share memory. The message has the reason.

    Either all ranks of a group raise this error or none.
    """


class SharedMemoryGroup:
    """Group whose ranks all run on this machine. The constructor is collective.

    Args:
        group: The process group.
        label: Name of the group in errors, such as `dp_shard`.

    Attributes:
        group: The process group.
        label: Name of the group in errors.
        ranks: Number of ranks.
        rank: This process's rank in the group.
        timeout_seconds: Longest time that a wait may take.

    Raises:
        SharedMemoryUnavailable: The ranks do not share a machine, or the platform is not supported.
    """

    def __init__(self, group: dist.ProcessGroup, *, label: str) -> None:
        self.group = group
        self.label = label
        self.ranks = group.size()
        self.rank = group.rank()
        self.timeout_seconds = timeout_of(group)
        self._global_ranks = dist.get_process_group_ranks(group)
        _raise_on_all_ranks(group, _unsupported_platform())
        # This raises SharedMemoryUnavailable unless the ranks share a machine.
        SharedMemory(self, word_count=1, data_bytes=0)

        process = (os.getpid(), os.stat("/proc/self/ns/pid").st_ino)
        self._processes = all_gather_objects(process, group)
        """Process number (PID) and PID namespace of each rank."""
        self._sees_processes = len({namespace for _, namespace in self._processes}) == 1

    def name(self, rank: int) -> str:
        """Return `rank N` for messages, where N is the global rank of a rank of the group."""
        return f"rank {self._global_ranks[rank]}"

    def wait(
        self,
        late_ranks: Callable[[], list[int]],
        *,
        operation: str,
        sequence: int = 0,
        shape: str = "",
    ) -> None:
        """Wait until no rank is late. The wait first yields the core and then sleeps.

        There may be more ranks than cores, so a busy loop would take the core from a late rank.

        Args:
            late_ranks: Function that returns the ranks of the group that are still late.
            operation: Name of the collective, for messages.
            sequence: Number of the collective within the group, for messages.
            shape: Shape and dtype of the tensor, for messages.

        Raises:
            CommunicationError: A late rank has ended, or the wait has reached the group's timeout.
                The message names the ranks and the operation.
        """
        began = time.monotonic()
        while late_ranks():
            os.sched_yield()
            if time.monotonic() - began > _YIELDING_SECONDS:
                break
        missing = late_ranks()
        if not missing:
            return
        wait = Wait(
            operation,
            self.label,
            began,
            sequence,
            shape,
            self._to_global(missing),
            tuple(self._global_ranks),
        )
        with WATCH.waiting(wait):
            self._sleep_until_complete(late_ranks, wait)

    def _sleep_until_complete(self, late_ranks: Callable[[], list[int]], wait: Wait) -> None:
        """Sleep until no rank is late, and publish changes of `wait`."""
        checked = wait.since
        pause = _FIRST_PAUSE_SECONDS
        while late_ranks():
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
            now = time.monotonic()
            if now - checked <= _CHECK_SECONDS:
                continue
            checked = now
            missing = self._check(late_ranks, wait.operation, waited=now - wait.since)
            global_missing = self._to_global(missing)
            if global_missing and global_missing != wait.missing:
                wait = replace(wait, missing=global_missing)
                WATCH.update_wait(wait)

    def _to_global(self, ranks: list[int]) -> tuple[int, ...]:
        return tuple(self._global_ranks[rank] for rank in ranks)

    def _check(
        self, late_ranks: Callable[[], list[int]], operation: str, *, waited: float
    ) -> list[int]:
        """Return the ranks that are late. Raises CommunicationError as `wait` does."""
        ended = self._ended_ranks()
        # In this order, because a rank may have finished its part just before it ended.
        missing = late_ranks()
        missing_ended = [rank for rank in missing if rank in ended]
        this_rank = self.name(self.rank)
        if missing_ended:
            names = ", ".join(
                f"{self.name(rank)} (process {self._processes[rank][0]})" for rank in missing_ended
            )
            raise CommunicationError(
                f"{operation} over {self.label}: {names} ended while {this_rank} waited for it;"
                " look for the first error in the output of that process"
            )
        if missing and waited > self.timeout_seconds:
            names = ", ".join(self.name(rank) for rank in missing)
            raise CommunicationError(
                f"{operation} over {self.label}: {this_rank} waited {waited:.0f} s for {names},"
                " which is running but has not started this call; find out where it hangs, or set"
                " faults.check_collectives = true to see whether ranks issue different collectives"
            )
        return missing

    def _ended_ranks(self) -> set[int]:
        if not self._sees_processes:
            # Processes of other containers are not visible. Only the timeout ends a wait.
            return set()
        return {
            rank
            for rank, (process, _) in enumerate(self._processes)
            if stacks.state(process) in stacks.ENDED
        }


class SharedMemory:
    """Bytes and counters that every rank of a `SharedMemoryGroup` reads and writes.

    The counters are int64 words that start at 0, and a rank writes only its own words. On x86-64, a
    rank that sees the new value of a word also sees everything that was written before the word.
    The memory is freed when no tensor of any rank points into it.

    The constructor is collective over the host's group, with equal arguments on all ranks.

    Args:
        host: Ranks of the group.
        word_count: Number of words per rank.
        data_bytes: Bytes of data, from which `tensor` returns ranges.

    Raises:
        SharedMemoryUnavailable: A rank cannot map the memory, or the size exceeds the allowed share
            of the free memory.
    """

    def __init__(self, host: SharedMemoryGroup, *, word_count: int, data_bytes: int) -> None:
        self._ranks = host.ranks
        # A row fills pairs of cache lines, so that ranks do not disturb each other.
        self._row_words = math.ceil(word_count / 16) * 16
        self._first_word = host.rank * self._row_words
        words_start = _round_to_pages(_NONCE_BYTES)
        words_bytes = host.ranks * self._row_words * 8
        self._data_start = words_start + _round_to_pages(words_bytes)
        # An empty tensor at the end points to one element.
        total = self._data_start + _round_to_pages(data_bytes + 64)

        descriptor = None
        offer: tuple[str, bytes] | str | None = None
        if host.rank == 0:
            descriptor, offer = _offer(total)
        mapped, problem = _open(broadcast_object(offer, host.group), total)
        try:
            # This is also a barrier. The first rank must not close its descriptor before all ranks
            # have opened the file.
            _raise_on_all_ranks(host.group, problem)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        assert mapped is not None
        self._mapped = mapped
        self._words = memoryview(mapped)[words_start : words_start + words_bytes].cast("q")
        """Words of all ranks, in one row per rank."""

    def read(self, rank: int, index: int) -> int:
        """Return the word `index` of any rank of the group."""
        return int(self._words[rank * self._row_words + index])

    def write(self, index: int, value: int) -> None:
        """Set the word `index` of this rank."""
        self._words[self._first_word + index] = value

    def behind(self, index: int, count: int) -> list[int]:
        """Return the ranks whose word `index` is below `count`."""
        return [rank for rank in range(self._ranks) if self.read(rank, index) < count]

    def tensor(
        self,
        offset: int,
        numel: int,
        dtype: torch.dtype,
        on_release: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Return a tensor [numel] on a range of the shared data bytes.

        Args:
            offset: First byte of the range.
            numel: Number of elements.
            dtype: Dtype of the elements.
            on_release: Function that is called when no tensor of this rank references the range any
                more.
        """
        start = self._data_start + offset
        # `frombuffer` refuses to make an empty tensor.
        count = max(numel, 1)
        window = memoryview(self._mapped)[start : start + count * dtype.itemsize]
        if on_release is not None:
            # The storage of the tensor, which views share, references the window.
            weakref.finalize(window, on_release).atexit = False
        return torch.frombuffer(window, dtype=dtype, count=count)[:numel]


def _raise_on_all_ranks(group: dist.ProcessGroup, problem: str | None) -> None:
    """Raise SharedMemoryUnavailable on every rank if any rank has a problem. Collective."""
    for rank, text in enumerate(all_gather_objects(problem, group)):
        if text is not None:
            raise SharedMemoryUnavailable(f"rank {dist.get_global_rank(group, rank)}: {text}")


def _unsupported_platform() -> str | None:
    if sys.platform != "linux":
        return f"shared memory is for Linux, this is {sys.platform}"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"shared memory relies on the memory order of x86-64, this is {platform.machine()}"
    return None


def _offer(total: int) -> tuple[int | None, tuple[str, bytes] | str]:
    """Create an anonymous file. Return (descriptor, (path, nonce)), or (None, reason)."""
    free = free_host_bytes()
    if free is not None and total > free * _SHARE_OF_FREE_MEMORY:
        return None, f"{format_bytes(total)} to share, and {format_bytes(free)} of memory are free"
    try:
        descriptor = anonymous_file("plait")
    except OSError as error:
        return None, f"memory to share between processes: {error.strerror}"
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        os.ftruncate(descriptor, total)
        os.pwrite(descriptor, nonce, 0)
    except OSError as error:
        os.close(descriptor)
        return None, f"{format_bytes(total)} of shared memory: {error.strerror}"
    return descriptor, (f"/proc/{os.getpid()}/fd/{descriptor}", nonce)


def _open(offer: tuple[str, bytes] | str | None, total: int) -> tuple[mmap.mmap | None, str | None]:
    """Map the file that the first rank offers. Return (mapping, None), or (None, reason)."""
    if not isinstance(offer, tuple):
        return None, offer or "the first rank shares no memory"
    path, nonce = offer
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return None, (
            f"the first rank's memory cannot be opened ({error.strerror}); it runs on another"
            " machine, in another container or as another user"
        )
    try:
        if os.fstat(descriptor).st_size != total or os.pread(descriptor, _NONCE_BYTES, 0) != nonce:
            return None, (
                "the opened memory is not the first rank's; it runs on another machine or in"
                " another container"
            )
        return mmap.mmap(descriptor, total), None
    except OSError as error:
        return None, f"the first rank's memory cannot be mapped ({error.strerror})"
    finally:
        os.close(descriptor)


def _round_to_pages(count: int) -> int:
    return math.ceil(count / _PAGE) * _PAGE
