"""Weights in safetensors files: locations of tensors, and buffered or direct reads.

Note [Cached and direct reads]
    A read through the kernel's cache fills pages of the cache and copies them, even if the pages
    are dropped before they are read again, as happens with a model that is larger than memory.
    Bytes that are not in the cache when they are read again are therefore read directly (O_DIRECT).
    If tensors can have the same layout in memory as in the file (`FileImage`), the target is the
    memory that computations use. Otherwise it is a small buffer, from which the bytes are copied.
    Direct reads transfer complete sectors to addresses that are multiples of a sector. If only two
    cores are available, copying bytes in memory reduces the rate of a 3 GB/s disk by a third. Bytes
    that are still in the kernel's cache are read from it.

Note [No computation in mappings]
    Weights are copied from the cache. Computing with them in a mapping of the file reduced the
    processor time of the benchmark by a third (from 1.5 to 1.0 s), but the elapsed time only by
    zero to a third, depending on the size of the cache's pages. In addition, the last bits of a
    product of one row change if its weight does not begin at a multiple of 16 bytes, as in half of
    all safetensors files.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch

from plait.cluster import host_memory
from plait.errors import CheckpointError

READ_BYTES = 16 << 20
"""Largest size of one read. Between reads a thread can be ended."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor in a file."""

    path: Path
    offset: int
    """Offset of the first byte in the file."""
    size: int
    """Number of bytes."""
    dtype: torch.dtype | None
    """Dtype; None for those that no model computes in."""
    shape: tuple[int, ...]


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the locations of all tensors of a safetensors file, from its header.

    Raises:
        CheckpointError: The file cannot be read, is not a safetensors file, or is incomplete.
    """
    try:
        with path.open("rb") as file:
            # The file begins with the size of its header as a 64-bit integer.
            begin = 8 + int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if begin > size:
                raise ValueError(
                    f"its header would end at byte {begin:,}, but the file has {size:,} bytes"
                )
            header: dict[str, Any] = json.loads(file.read(begin - 8))
        stored: dict[str, StoredTensor] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                stored[name] = _location(path, name, entry, begin, size)
        return stored
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file: {error}; download or save the folder again"
        ) from None


def _location(path: Path, name: str, entry: dict[str, Any], begin: int, size: int) -> StoredTensor:
    # Offsets count from the end of the header.
    low, high = entry["data_offsets"]
    if begin + high > size:
        raise CheckpointError(
            f"{path}: {name} would end at byte {begin + high:,} of {size:,}; the file is truncated:"
            " download or save it again"
        )
    dtype = _DTYPES.get(entry["dtype"])
    shape = tuple(entry["shape"])
    has_wrong_size = dtype is not None and math.prod(shape) * dtype.itemsize != high - low
    if low < 0 or high < low or has_wrong_size:
        raise ValueError(
            f"bytes {low:,} to {high:,} of {name} are not the size of"
            f" {entry['dtype']} {list(shape)}"
        )
    return StoredTensor(path, begin + low, high - low, dtype, shape)


def read_into(
    file: int, view: memoryview, stored: StoredTensor, ended: threading.Event, *, first: int = 0
) -> None:
    """Read bytes of a tensor into memory, until it is full or the event is set.

    Args:
        file: Descriptor of the tensor's file.
        view: The memory.
        stored: Location of the tensor.
        ended: Event after which nothing more is read.
        first: Offset of the first byte to read within the tensor.

    Raises:
        CheckpointError: The bytes cannot be read.
    """
    begin = stored.offset + first
    done = 0
    while done < len(view) and not ended.is_set():
        try:
            count = os.preadv(file, [view[done : done + READ_BYTES]], begin + done)
        except OSError as error:
            raise CheckpointError(
                f"{stored.path} cannot be read at byte {begin + done:,}: {error.strerror};"
                " check the disk"
            ) from error
        if not count:
            raise CheckpointError(
                f"{stored.path} ends at byte {begin + done:,}, before the end of a tensor: the file"
                " was truncated; download or save it again"
            )
        done += count


class DaemonThreads(Executor):
    """Executor whose threads do not keep the process alive.

    At exit, Python waits for the threads of a ThreadPoolExecutor, even if one of them waits for a
    disk that does not answer.

    Args:
        count: Number of threads.
        name: Prefix of their names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = []
        for number in range(count):
            thread = Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Call a function as soon as a thread is idle, and return the future of its result."""
        future: Future[Any] = Future()
        self._calls.put((future, partial(function, *args, **options)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after the submitted calls.

        Args:
            wait: Whether to wait for the threads.
            cancel_futures: Whether to cancel the calls that have not started.
        """
        while cancel_futures:
            try:
                call = self._calls.get_nowait()
            except Empty:
                break
            if call is not None:
                call[0].cancel()
        # Each thread takes one of these and ends.
        for _ in self._threads:
            self._calls.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, work = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # raised where the result is read
                future.set_exception(error)
            else:
                future.set_result(result)
            # Otherwise the arguments would stay alive until the next call.
            del call, future, work


MAX_BUFFERED_READ_BYTES = 4 << 20
"""Largest size of a read to a buffer."""
MAX_IMAGE_READ_BYTES = 12 << 20
"""Largest size of a read to an image.

Such reads are a tenth faster than reads of 4 MiB, and they need no buffer.
"""
CONCURRENT_READS = 2
"""Number of reads at a time."""
MIN_DIRECT_LAYER_BYTES = 4 * MAX_BUFFERED_READ_BYTES
"""Size of a layer below which it is always read through the kernel's cache, without buffers."""
PATIENCE_SECONDS = 8.0
"""Duration after which the read of a block is an error."""
_MAX_GAP_BYTES = 64 << 10
"""Largest gap between two tensors that is read with them."""
PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class TensorPart:
    """Bytes of a stored tensor, and the memory into which they are read."""

    stored: StoredTensor
    first: int
    """Offset of the first byte in the tensor."""
    memory: torch.Tensor
    """Destination: uint8, on the CPU. Its size is the number of bytes."""

    @property
    def offset(self) -> int:
        """Offset of the first byte in the file."""
        return self.stored.offset + self.first

    @property
    def end(self) -> int:
        """Offset in the file after the last byte."""
        return self.offset + self.memory.numel()


@dataclass(frozen=True)
class FileImage:
    """Memory with the same layout as a section of a file, so that tensors are views of it."""

    low: int
    """Offset in the file: a multiple of a page, like the address of the memory."""
    memory: torch.Tensor
    """Complete pages: uint8, on the CPU. Bytes between tensors are overwritten."""


@dataclass
class FileBlock:
    """Section of one file that a single read transfers."""

    low: int
    """Offset of the first byte in the file, a multiple of a page."""
    image: FileImage | None = None
    """Image that all parts are views of; None if the block is read to a buffer."""
    parts: list[TensorPart] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """Path of the file that is read."""
        return self.parts[0].stored.path

    @property
    def size(self) -> int:
        """Number of bytes from `low` to the end of the parts."""
        return max(part.end for part in self.parts) - self.low


def buffer_bytes(largest: int) -> int:
    """Return the size of all buffers of a reader whose largest layer has `largest` bytes."""
    if largest < MIN_DIRECT_LAYER_BYTES:
        return 0
    return CONCURRENT_READS * MAX_BUFFERED_READ_BYTES


def blocks_of(parts: Sequence[TensorPart], image: FileImage | None = None) -> Iterator[FileBlock]:
    """Yield the reads of parts of tensors, in the order of the files.

    Args:
        parts: The parts. With an image they are all in one file.
        image: Memory that contains all parts in the layout of the file, or None.
    """
    block = None
    limit = MAX_BUFFERED_READ_BYTES
    if image is not None:
        limit = _even_read_bytes(max(part.end for part in parts) - image.low)
    for part in sorted(parts, key=lambda part: (str(part.stored.path), part.offset)):
        position = part.offset
        while position < part.end:
            if block is not None and not _continues(block, part, position, limit):
                yield block
                block = None
            if block is None:
                block = FileBlock(position // PAGE * PAGE, image)
            end = min(part.end, block.low + limit)
            memory = part.memory[position - part.offset : end - part.offset]
            block.parts.append(TensorPart(part.stored, position - part.stored.offset, memory))
            position = end
    if block is not None:
        yield block


def _continues(block: FileBlock, part: TensorPart, position: int, limit: int) -> bool:
    """Return True if the bytes of a part from `position` on can be appended to a block.

    The longer block may have at most `limit` bytes.
    """
    if block.path != part.stored.path or position >= block.low + limit:
        return False
    return position - block.low - block.size <= _MAX_GAP_BYTES


def _even_read_bytes(size: int) -> int:
    """Return the size of each read if `size` bytes are read in about equal parts.

    There are as few reads as possible, of complete pages. A small last read would take longer per
    byte.
    """
    reads = max(1, -(-size // MAX_IMAGE_READ_BYTES))
    return -(-size // reads // PAGE) * PAGE


class FileReader:
    """Reader of parts of tensors from some files. `close` releases its threads and buffers.

    Args:
        paths: The files.
        largest: Size of the largest layer in bytes.
        keeps: Whether bytes are read through the kernel's cache at first.
    """

    def __init__(self, paths: Collection[Path], *, largest: int, keeps: bool) -> None:
        is_direct = largest >= MIN_DIRECT_LAYER_BYTES
        self._files = {path: _OpenFile(path, direct=is_direct) for path in paths}
        self._keeps = keeps
        self._seen: set[tuple[Path, int]] = set()
        """Blocks that have been read before."""
        self._buffers: SimpleQueue[np.ndarray] = SimpleQueue()
        for _ in range(buffer_bytes(largest) // MAX_BUFFERED_READ_BYTES):
            # These begin at a page, which reads past the kernel's cache (O_DIRECT) require.
            buffer = host_memory.empty_on_huge_pages((MAX_BUFFERED_READ_BYTES,), torch.uint8)
            self._buffers.put(buffer.numpy())
        self._ended = threading.Event()
        self._running: dict[int, tuple[float, FileBlock]] = {}
        """Start and block of the current read of each thread."""
        self._threads = DaemonThreads(CONCURRENT_READS, "plait-reads")

    def read(self, parts: Sequence[TensorPart], image: FileImage | None = None) -> None:
        """Read parts of tensors, and wait until all reads have ended.

        No thread writes to the tensors after this call, even if it raises an error.

        Args:
            parts: The parts.
            image: See `blocks_of`.

        Raises:
            CheckpointError: A file cannot be read.
        """
        reads = [self._threads.submit(self.read_block, block) for block in blocks_of(parts, image)]
        # All of them, before the first error is raised.
        wait(reads)
        for read in reads:
            read.result()

    @property
    def stuck_block(self) -> FileBlock | None:
        """Block whose read takes longer than `PATIENCE_SECONDS`, or None."""
        # Threads change the dictionary meanwhile.
        for start, block in self._running.copy().values():
            if time.monotonic() - start > PATIENCE_SECONDS:
                return block
        return None

    def read_block(self, block: FileBlock) -> None:
        """Read a block. Called in a thread."""
        if self._ended.is_set():
            return
        self._running[threading.get_ident()] = time.monotonic(), block
        try:
            self._read_block(block)
            self._files[block.path].refuse_changed_file(block.path)
        finally:
            del self._running[threading.get_ident()]

    def _read_block(self, block: FileBlock) -> None:
        # See Note [Cached and direct reads].
        file = self._files[block.path]
        is_new = (block.path, block.low) not in self._seen
        self._seen.add((block.path, block.low))
        may_be_cached = is_new and self._keeps
        if (
            file.direct is not None
            and not may_be_cached
            and not file.has_in_cache(block)
            and self._read_directly(file.direct, block)
        ):
            return
        for part in block.parts:
            read_into(
                file.cached,
                memoryview(part.memory.numpy().data),
                part.stored,
                self._ended,
                first=part.first,
            )

    def _read_directly(self, file: int, block: FileBlock) -> bool:
        """Read a block with direct I/O. Return False if the system does not support it."""
        size = -(-block.size // PAGE) * PAGE
        if block.image is not None:
            start = block.low - block.image.low
            view = memoryview(block.image.memory.numpy().data)[start : start + size]
            return _read_pages(file, block, view)

        buffer = self._buffers.get()
        try:
            if not _read_pages(file, block, memoryview(buffer.data)[:size]):
                return False
            for part in block.parts:
                start = part.offset - block.low
                np.copyto(part.memory.numpy(), buffer[start : start + part.memory.numel()])
        finally:
            self._buffers.put(buffer)
        return True

    def end(self) -> None:
        """Request that unfinished reads stop early."""
        self._ended.set()

    def close(self) -> None:
        """End the threads and close the files. Nothing may be read afterwards.

        Files on a disk that does not answer stay open.
        """
        self.end()
        stuck = self.stuck_block is not None
        self._threads.shutdown(wait=not stuck, cancel_futures=True)
        if stuck:
            return
        for file in self._files.values():
            file.close()
        self._files.clear()


def _read_pages(file: int, block: FileBlock, view: memoryview) -> bool:
    """Read a block into complete pages of memory, through a descriptor for direct reads.

    Returns:
        False if the system does not support direct reads, or the file ends before the block.
    """
    done = 0
    while done < block.size:
        try:
            count = os.preadv(file, [view[done:]], block.low + done)
        except OSError:
            return False  # the read through the cache then raises the error
        done += count
        if done < block.size and (not count or done % PAGE):
            return False  # the file ends here
    return True


class _OpenFile:
    """File that is open for cached and for direct reads.

    The file is also mapped, to find out which of its pages are in the kernel's cache. Nothing is
    read through the mapping, see Note [No computation in mappings].
    """

    def __init__(self, path: Path, *, direct: bool) -> None:
        self.cached = os.open(path, os.O_RDONLY)
        self._written = self._last_write()
        self.direct: int | None = None
        """Descriptor for direct reads; None if the file is only read through the cache."""
        if not direct or not hasattr(os, "O_DIRECT"):
            return
        try:
            self.direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:  # the file system does not support it
            return
        self._map = mmap.mmap(self.cached, 0, prot=mmap.PROT_READ)
        self._pages = np.frombuffer(self._map, dtype=np.uint8)

    def has_in_cache(self, block: FileBlock) -> bool:
        """Return True if a complete block is in the kernel's cache.

        For a file that this user may not write to, the kernel reports every page as cached.
        """
        size = min(block.size, len(self._pages) - block.low)
        # The first page usually decides, and costs nothing.
        return self._is_cached(block.low, min(size, PAGE)) and self._is_cached(block.low, size)

    def _is_cached(self, low: int, size: int) -> bool:
        pages = np.empty(-(-size // PAGE), dtype=np.uint8)
        start = ctypes.c_void_p(self._pages.ctypes.data + low)
        destination = ctypes.c_void_p(pages.ctypes.data)
        if _LIBC.mincore(start, ctypes.c_size_t(size), destination) != 0:
            return False
        # The lowest bit of a page is set if the page is in memory.
        return bool((pages & 1).all())

    def refuse_changed_file(self, path: Path) -> None:
        """Raise CheckpointError if the file has been written to since it was opened.

        Otherwise a forward could mix layers of two models. If the path was replaced by a new file,
        the file that was opened is still read.
        """
        if self._last_write() != self._written:
            raise CheckpointError(
                f"{path} was written to while layers were streamed from it; wait until it is"
                " complete, and start again"
            )

    def _last_write(self) -> tuple[int, int]:
        status = os.fstat(self.cached)
        return status.st_size, status.st_mtime_ns

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self.cached)
        if self.direct is not None:
            os.close(self.direct)
