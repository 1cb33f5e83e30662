"""Reads of weights from files: several at a time, from the kernel's cache where it has them, and
past it where it does not keep them.

What is read through the kernel's cache takes its pages and a copy, also when they are dropped
before they are read again, as those of a model that is larger than memory are. So what is not in
the cache when it is read again is read directly (O_DIRECT): straight to where it computes, where it
may lie there as it does in the file (`Image`), else into a small buffer and copied from there.
Disks read whole sectors to addresses that are multiples of one, and copies take a third of the rate
of a disk of 3 GB/s where two cores do everything. What the kernel does keep is read from its cache.

Weights are copied from the cache, and not computed with in a mapping of the file. That saved a
third of the processor time (1.5 to 1.0 s of the benchmark's), but between nothing and a third of
the time that passed, by the size of the pages that the cache happened to have. And a product of one
row has other last bits where its weight does not begin at a multiple of 16 bytes, as in half of all
safetensors files.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch

from plait.cluster import huge_pages
from plait.errors import CheckpointError
from plait.inference.daemon_threads import DaemonThreads
from plait.inference.stored import Stored, read_into

BLOCK = 4 << 20
"""Bytes of one read through a buffer, at most."""
STRETCH = 12 << 20
"""Bytes of one straight to where they belong, at most: disks give a tenth more than in reads of 4
MiB, and no buffer has to be as large.
"""
IN_FLIGHT = 2
"""Reads at a time."""
LEAST = 4 * BLOCK
"""Bytes of a layer below which it is always read through the kernel's cache, and takes no buffers.
"""
PATIENCE_SECONDS = 8.0
"""A read of a block that takes longer is an error."""
_GAP = 64 << 10
"""Bytes between two tensors that are read with them."""
PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Part:
    """Bytes of a stored tensor."""

    stored: Stored
    first: int
    """Byte of the tensor."""
    memory: torch.Tensor
    """Where they go: uint8, on the CPU."""

    @property
    def offset(self) -> int:
        """Byte of the file."""
        return self.stored.offset + self.first

    @property
    def end(self) -> int:
        """Byte of the file behind them."""
        return self.offset + self.memory.numel()


@dataclass(frozen=True)
class Image:
    """Memory in which a stretch of a file lies as it does in the file, so that tensors are views of
    it.
    """

    low: int
    """Byte of the file where it begins: a multiple of a page, as its address is."""
    memory: torch.Tensor
    """uint8, on the CPU; whole pages. What lies between tensors is overwritten."""


@dataclass
class Block:
    """What one read brings: bytes of one file from `low` on, a multiple of a page; at most BLOCK of
    them, or STRETCH into an image.
    """

    low: int
    image: Image | None = None
    """That all its parts are views of."""
    parts: list[Part] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """Of the file."""
        return self.parts[0].stored.path

    @property
    def size(self) -> int:
        """Bytes from `low` to the end of its parts."""
        return max(part.end for part in self.parts) - self.low


def buffer_bytes(largest: int) -> int:
    """Of the buffers of reads of layers that have `largest` bytes at most."""
    return IN_FLIGHT * BLOCK if largest >= LEAST else 0


def blocks_of(parts: Sequence[Part], image: Image | None = None) -> Iterator[Block]:
    """The reads of all parts, in the files' order; of one file where they are views of an
    `image`.
    """
    block = None
    most = BLOCK if image is None else _even(max(part.end for part in parts) - image.low)
    for part in sorted(parts, key=lambda part: (str(part.stored.path), part.offset)):
        at = part.offset
        while at < part.end:
            if (
                block is None
                or block.path != part.stored.path
                or at >= block.low + most
                or at - block.low - block.size > _GAP
            ):
                if block is not None:
                    yield block
                block = Block(at // PAGE * PAGE, image)
            end = min(part.end, block.low + most)
            block.parts.append(
                Part(
                    part.stored,
                    at - part.stored.offset,
                    part.memory[at - part.offset : end - part.offset],
                )
            )
            at = end
    if block is not None:
        yield block


def _even(size: int) -> int:
    """Whole pages of a read of at most STRETCH bytes, where as few as can be bring `size` bytes:
    small ones take longer for each byte.
    """
    return -(-size // max(1, -(-size // STRETCH)) // PAGE) * PAGE


class FileReader:
    """Of some files. Owns threads and buffers; `close` ends them."""

    def __init__(self, paths: Collection[Path], *, largest: int, keeps: bool) -> None:
        """`largest`: bytes of a layer at most. `keeps`: whether the kernel may keep what is read
        for the first time.
        """
        self._files = {path: _File(path, direct=largest >= LEAST) for path in paths}
        self._keeps = keeps
        self._seen: set[tuple[Path, int]] = set()
        self._buffers: SimpleQueue[np.ndarray] = SimpleQueue()
        for _ in range(buffer_bytes(largest) // BLOCK):
            # These begin at a page, which reads past the kernel's cache (O_DIRECT) require.
            self._buffers.put(huge_pages.empty((BLOCK,), torch.uint8).numpy())
        self._ended = threading.Event()
        self._began: dict[int, tuple[float, Block]] = {}
        """When the reads that are on their way began, by thread, and what they bring."""
        self._threads = DaemonThreads(IN_FLIGHT, "plait-reads")

    def read(self, parts: Sequence[Part], image: Image | None = None) -> None:
        """Returns when everything is in its memory, or nothing writes there any more. Raises
        CheckpointError where it cannot be read.
        """
        reads = [self._threads.submit(self.read_block, block) for block in blocks_of(parts, image)]
        wait(reads)
        for read in reads:
            read.result()

    @property
    def oldest(self) -> tuple[float, Block] | None:
        """Seconds since the oldest read that is on its way began, and what it brings."""
        began = min(self._began.copy().values(), key=lambda one: one[0], default=None)
        return (time.monotonic() - began[0], began[1]) if began is not None else None

    @property
    def is_stuck(self) -> bool:
        """Whether a read takes longer than it may."""
        oldest = self.oldest
        return oldest is not None and oldest[0] > PATIENCE_SECONDS

    def read_block(self, block: Block) -> None:
        """In a thread."""
        if self._ended.is_set():
            return
        self._began[threading.get_ident()] = time.monotonic(), block
        try:
            self._read_block(block)
            self._files[block.path].refuse_other_bytes(block.path)
        finally:
            del self._began[threading.get_ident()]

    def _read_block(self, block: Block) -> None:
        file = self._files[block.path]
        is_new = (block.path, block.low) not in self._seen
        self._seen.add((block.path, block.low))
        if (
            file.direct is not None
            and not (is_new and self._keeps)
            and not file.has_in_cache(block)
            and self._read_directly(file, block)
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

    def _read_directly(self, file: _File, block: Block) -> bool:
        """False where the system does not."""
        assert file.direct is not None
        size = -(-block.size // PAGE) * PAGE
        if block.image is not None:
            start = block.low - block.image.low
            return _filled(
                file.direct,
                block,
                memoryview(block.image.memory.numpy().data)[start : start + size],
            )
        buffer = self._buffers.get()
        try:
            if not _filled(file.direct, block, memoryview(buffer.data)[:size]):
                return False
            for part in block.parts:
                start = part.offset - block.low
                np.copyto(part.memory.numpy(), buffer[start : start + part.memory.numel()])
        finally:
            self._buffers.put(buffer)
        return True

    def end(self) -> None:
        """Let reads end where they are."""
        self._ended.set()

    def close(self) -> None:
        """End the threads, and close the files; nobody reads any more. Files that a disk does not
        answer for stay open.
        """
        self.end()
        stuck = self.is_stuck
        self._threads.shutdown(wait=not stuck, cancel_futures=True)
        if stuck:
            return
        for file in self._files.values():
            file.close()
        self._files.clear()


def _filled(file: int, block: Block, view: memoryview) -> bool:
    """Read a block from its first byte on into whole pages. False where the system does not, or the
    file ends before.
    """
    done = 0
    while done < block.size:
        try:
            count = os.preadv(file, [view[done:]], block.low + done)
        except OSError:
            return False  # read through the cache, it says what is wrong
        done += count
        if done < block.size and (not count or done % PAGE):
            return False  # the file ends here
    return True


class _File:
    """Open in two ways, and mapped to see which of its pages the kernel has; nothing is read
    through the mapping.
    """

    def __init__(self, path: Path, *, direct: bool) -> None:
        self.cached = os.open(path, os.O_RDONLY)
        self._written = self._last_write()
        self.direct: int | None = None
        """None where the file is read through the cache only."""
        if not direct or not hasattr(os, "O_DIRECT"):
            return
        try:
            self.direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:  # a file system that does not
            return
        self._map = mmap.mmap(self.cached, 0, prot=mmap.PROT_READ)
        self._pages = np.frombuffer(self._map, dtype=np.uint8)

    def has_in_cache(self, block: Block) -> bool:
        """Whether all of a block is in the kernel's cache. It says so of every page of a file that
        this user may not write to.
        """
        size = min(block.size, len(self._pages) - block.low)
        # one page tells mostly, and costs nothing
        return self._has(block.low, min(size, PAGE)) and self._has(block.low, size)

    def _has(self, low: int, size: int) -> bool:
        found = np.empty(-(-size // PAGE), dtype=np.uint8)
        start = ctypes.c_void_p(self._pages.ctypes.data + low)
        into = ctypes.c_void_p(found.ctypes.data)
        return bool(_LIBC.mincore(start, ctypes.c_size_t(size), into) == 0 and (found & 1).all())

    def refuse_other_bytes(self, path: Path) -> None:
        """Raise CheckpointError where somebody has written to the file since it was opened: layers
        of one model and of another would compute together. A file that another one has replaced is
        still the one that was opened.
        """
        if self._last_write() != self._written:
            raise CheckpointError(
                f"{path} was written to while its layers were read from it for every token; wait"
                " until it is complete, and begin again"
            )

    def _last_write(self) -> tuple[int, int]:
        found = os.fstat(self.cached)
        return found.st_size, found.st_mtime_ns

    def close(self) -> None:
        """For good."""
        os.close(self.cached)
        if self.direct is not None:
            os.close(self.direct)
