"""Arena of tensors in memory-mapped files, and prefetching of parameter shards in an arena.

A mapped tensor is an ordinary CPU tensor, so optimizers, checkpoints and collectives work on it
unchanged. Explicit calls bound the memory: `fetch` reads a range before it is used, and `evict`
starts to write the range to the disk and releases its pages. Disk space is reserved when a tensor
is created, so a full disk raises an error at that time and does not crash a later step. The files
have no name: a process that dies leaves nothing behind.

Every training step gathers its units in the same order. When `ShardPrefetcher` sees an all-gather,
it therefore reads the unit that was gathered next in the previous step. This applies in forward, in
backward and between the two. A shard is evicted as soon as the all-gather has read it. If the order
changes, some reads are needless, but no result is wrong, because the files are mapped.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from plait._torch.gathering import GatherPhase, on_shard_reads
from plait._torch.units import shard_buffers
from plait.errors import PlaitError
from plait.files import require_folder
from plait.sizes import MIB, format_bytes

PAGE = mmap.PAGESIZE
# Values of madvise on Linux.
_WILLNEED = 3
_DONTNEED = 4
# Since Linux 5.14.
_POPULATE_READ = 22
_POPULATE_WRITE = 23
# M_MMAP_THRESHOLD of glibc's mallopt.
_MMAP_THRESHOLD = -3
# SYNC_FILE_RANGE_WRITE of Linux: start to write, do not wait.
_WRITE_RANGE = 2


def in_pages(tensor: torch.Tensor) -> int:
    """Return the bytes of the complete pages that a copy of a tensor occupies in an arena."""
    return _pages(tensor.nbytes)


def _pages(size: int) -> int:
    return -(-max(1, size) // PAGE) * PAGE


class Arena:
    """Memory-mapped tensors in the files of one folder."""

    def __init__(
        self, folder: Path, *, field: str = "zero_optimization.offload_optimizer.nvme_path"
    ) -> None:
        """Create an arena in `folder`. Errors name `field`, the setting that names the folder."""
        self.folder = folder
        self.field = field
        self.reserved_bytes = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        if hasattr(self._libc, "mallopt"):
            # glibc keeps freed memory below a threshold that grows with use. Blocks are gathered
            # and freed all the time here, and would take the memory that the files are to save.
            self._libc.mallopt(_MMAP_THRESHOLD, MIB)
        self._segments: list[_Segment] = []
        require_folder(folder, field=field)

    def reserve(self, size: int) -> None:
        """Reserve disk space for tensors.

        Args:
            size: Bytes to reserve.

        Raises:
            PlaitError: The disk is too full.
        """
        self._segments.append(_Segment(self._file(size), size))
        self.reserved_bytes += size

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous mapped tensor, which shares no page with others."""
        shape = tuple(shape)
        used_bytes = math.prod(shape) * dtype.itemsize
        size = _pages(used_bytes)
        segment = next((s for s in self._segments if s.used + size <= s.size), None)
        if segment is None:
            self.reserve(size)
            segment = self._segments[-1]
        flat = segment.bytes[segment.used : segment.used + used_bytes]
        segment.used += size
        return flat.view(dtype).view(shape)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a mapped copy of a plain tensor."""
        mapped = self.empty(tensor.shape, tensor.dtype)
        mapped.copy_(tensor)
        self.evict(mapped)
        return mapped

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is mapped in this arena."""
        return self._segment(tensor) is not None

    def fetch(self, tensor: torch.Tensor, *, write: bool) -> None:
        """Read a mapped tensor, or a slice of one, into memory.

        It blocks, but releases the interpreter's lock.

        Args:
            tensor: The tensor.
            write: Whether it will be written to.
        """
        if not tensor.numel():
            return
        self.transfer(tensor.nbytes, reading=True)
        if self._advise(tensor, _POPULATE_WRITE if write else _POPULATE_READ) != 0:
            # Older kernels can only read ahead without waiting.
            self._advise(tensor, _WILLNEED)

    def evict(self, tensor: torch.Tensor, *, written: bool = True) -> None:
        """Release the memory of a mapped tensor, or of a slice of one.

        Args:
            tensor: The tensor. One that is not mapped in this arena is ignored.
            written: Whether it has changed, so that the system should start to write it to the
                disk.
        """
        segment = self._segment(tensor)
        if segment is None or not tensor.numel():
            return
        if written:
            self.transfer(tensor.nbytes, reading=False)
            if hasattr(self._libc, "sync_file_range"):
                offset = tensor.data_ptr() - segment.bytes.data_ptr()
                self._libc.sync_file_range(
                    segment.file.fileno(),
                    ctypes.c_longlong(offset),
                    ctypes.c_longlong(tensor.nbytes),
                    _WRITE_RANGE,
                )
        # In a shared mapping the pages leave this process, and their content stays in the file.
        self._advise(tensor, _DONTNEED)

    def close(self) -> None:
        """Close the files. Tensors stay readable, but can no longer be fetched or evicted."""
        for segment in self._segments:
            segment.file.close()
        self._segments.clear()

    def transfer(self, size: int, *, reading: bool) -> None:
        """Do nothing. Tests override it to count or slow down each move of `size` bytes."""

    def _file(self, size: int) -> Any:
        file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        try:
            os.posix_fallocate(file.fileno(), 0, max(size, PAGE))
        except OSError as error:
            file.close()
            raise PlaitError(
                f"{self.field} = {str(self.folder)!r}: {format_bytes(size)} are needed there "
                f"({error.strerror}); free some space, or name another folder. Nothing was changed"
            ) from error
        return file

    def _segment(self, tensor: torch.Tensor) -> _Segment | None:
        address = tensor.data_ptr()
        for segment in self._segments:
            start = segment.bytes.data_ptr()
            if start <= address < start + segment.size:
                return segment
        return None

    def _advise(self, tensor: torch.Tensor, advice: int) -> int:
        start = tensor.data_ptr() // PAGE * PAGE
        length = _pages(tensor.data_ptr() + tensor.nbytes - start)
        return int(self._libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice))


class _Segment:
    """File of an arena, mapped into memory as bytes."""

    def __init__(self, file: Any, size: int) -> None:
        self.file = file
        self.size = size
        self.used = 0
        storage = torch.UntypedStorage.from_file(
            f"/proc/self/fd/{file.fileno()}", True, max(size, PAGE)
        )
        assert isinstance(storage, torch.UntypedStorage)
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage)


_Gather = tuple[GatherPhase, int | None, int]
"""All-gather of a unit: (phase, the unit gathered before it or None, the unit)."""


class ShardPrefetcher:
    """Prefetching of a sharded model's shards from an arena.

    Shards take at most `pool_bytes` of memory at once. If a single unit is larger, they take as
    much as this unit while it is gathered.
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
            self._sizes.append(sum(shard.nbytes for shard in shards))
        self._pool_bytes = pool_bytes
        self._reader = reader
        self._follows: dict[_Gather, tuple[GatherPhase, int] | None] = {}
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

    def _before(self, unit: int, when: GatherPhase) -> None:
        previous_unit = None
        if self._last is not None:
            self._follows[self._last] = (when, unit)
            previous_unit = self._last[2]
        self._last = (when, previous_unit, unit)
        read = self._ahead.pop(unit, None) or self._reader.submit(self._fetch, unit)
        # The next reads are queued before the wait for this one, so that the thread goes on.
        self._prefetch(unit)
        read.result()

    def _after(self, unit: int) -> None:
        if not self._stays:
            self._evict(unit)

    def _prefetch(self, current: int) -> None:
        """Start reading the units that will be gathered next, as many as fit into the pool."""
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
                self._ahead[unit] = self._reader.submit(self._fetch, unit)
        if self._stays:
            # It stays in memory, so the next all-gather finds a read that is complete.
            done: Future[None] = Future()
            done.set_result(None)
            self._ahead[current] = done

    def _fetch(self, unit: int) -> None:
        for shard in self._shards[unit]:
            self._arena.fetch(shard, write=False)

    def _evict(self, unit: int) -> None:
        for shard in self._shards[unit]:
            self._arena.evict(shard, written=False)

    def _drop(self, unit: int) -> None:
        """Queue the eviction of a unit after its read, which may still be running."""
        del self._ahead[unit]
        self._reader.submit(self._evict, unit)
