"""Tensors in files: memory-mapped, reserved on disk before use, fetched and evicted in ranges by
the code that iterates over them.

A mapped tensor is an ordinary CPU tensor, so optimizers, checkpoints and collectives work on it
unchanged. The order of accesses bounds the memory: `fetch` reads a range before it is used, `evict`
starts its write to the disk and releases its pages. Space is reserved when a tensor is made, so a
full disk is an error there and never a fault in the middle of a step. The file has no name: a
process that dies leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from plait.errors import PlaitError
from plait.parallel.offload.folders import require_writable
from plait.units import MIB, format_bytes

PAGE = mmap.PAGESIZE
# Linux's numbers; the last two since 5.14
_WILLNEED, _DONTNEED, _POPULATE_READ, _POPULATE_WRITE = (3, 4, 22, 23)
_MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
_WRITE_RANGE = 2  # SYNC_FILE_RANGE_WRITE: start to write, do not wait


def in_pages(tensor: torch.Tensor) -> int:
    """Bytes that a tensor's copy takes in an arena: whole pages."""
    return _pages(tensor.numel() * tensor.element_size())


def _pages(size: int) -> int:
    return -(-max(1, size) // PAGE) * PAGE


class Arena:
    """Mapped tensors in one folder."""

    def __init__(
        self, folder: Path, *, field: str = "zero_optimization.offload_optimizer.nvme_path"
    ) -> None:
        """`field` of the configuration names the folder."""
        self.folder = folder
        self.field = field
        self.reserved_bytes = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        if hasattr(self._libc, "mallopt"):
            # glibc keeps what is freed below a threshold that grows with use. Blocks are gathered
            # and freed all the time here: kept, their memory would be what the files were to save.
            self._libc.mallopt(_MMAP_THRESHOLD, MIB)
        self._segments: list[_Segment] = []
        require_writable(folder, field=field)

    def reserve(self, size: int) -> None:
        """Take `size` bytes of disk now, for tensors to come. Raises PlaitError where the disk does
        not have them.
        """
        self._segments.append(_Segment(self._file(size), size))
        self.reserved_bytes += size

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised mapped tensor, contiguous, on pages of its own."""
        shape = tuple(shape)
        count = 1
        for length in shape:
            count *= length
        size = _pages(count * dtype.itemsize)
        segment = next((s for s in self._segments if s.used + size <= s.size), None)
        if segment is None:
            self.reserve(size)
            segment = self._segments[-1]
        flat = segment.bytes[segment.used : segment.used + count * dtype.itemsize]
        segment.used += size
        return flat.view(dtype).view(shape)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A mapped copy of a plain tensor."""
        mapped = self.empty(tensor.shape, tensor.dtype)
        mapped.copy_(tensor)
        self.evict(mapped)
        return mapped

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is mapped here."""
        return self._segment(tensor) is not None

    def fetch(self, tensor: torch.Tensor, *, write: bool) -> None:
        """Bring a mapped tensor, or a slice of one, into memory; blocks, without the interpreter's
        lock. `write`: it will be written to.
        """
        if not tensor.numel():
            return
        self.transfer(tensor.numel() * tensor.element_size(), reading=True)
        if self._advise(tensor, _POPULATE_WRITE if write else _POPULATE_READ) != 0:
            self._advise(tensor, _WILLNEED)  # an older kernel: reading ahead without waiting

    def evict(self, tensor: torch.Tensor, *, written: bool = True) -> None:
        """Release the memory of a mapped tensor, or of a slice of one; the system writes changed
        pages to the disk.
        """
        segment = self._segment(tensor)
        if segment is None or not tensor.numel():
            return
        size = tensor.numel() * tensor.element_size()
        if written:
            self.transfer(size, reading=False)
            offset = tensor.data_ptr() - segment.bytes.data_ptr()
            if hasattr(self._libc, "sync_file_range"):
                self._libc.sync_file_range(
                    segment.file.fileno(),
                    ctypes.c_longlong(offset),
                    ctypes.c_longlong(size),
                    _WRITE_RANGE,
                )
        # of a shared mapping: the pages leave this process, their content stays in the file
        self._advise(tensor, _DONTNEED)

    def close(self) -> None:
        """Close the files. Tensors stay readable; none is fetched or evicted any more."""
        for segment in self._segments:
            segment.file.close()
        self._segments.clear()

    def transfer(self, size: int, *, reading: bool) -> None:
        """Called before every move of `size` bytes; for tests that count or slow them down."""

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
        return next(
            (
                s
                for s in self._segments
                if s.bytes.data_ptr() <= address < s.bytes.data_ptr() + s.size
            ),
            None,
        )

    def _advise(self, tensor: torch.Tensor, advice: int) -> int:
        start = tensor.data_ptr() // PAGE * PAGE
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
        return int(
            self._libc.madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(-(-(end - start) // PAGE) * PAGE), advice
            )
        )


class _Segment:
    """One file, mapped as bytes."""

    def __init__(self, file: Any, size: int) -> None:
        self.file = file
        self.size = size
        self.used = 0
        storage = torch.UntypedStorage.from_file(
            f"/proc/self/fd/{file.fileno()}", True, max(size, PAGE)
        )
        assert isinstance(storage, torch.UntypedStorage)
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage)
