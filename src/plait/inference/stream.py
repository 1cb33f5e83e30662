"""Blocks of a model whose weights do not stay where they compute: each is brought there just before
it runs.

There are `SLOTS` places for the weights of a block where the model computes; when a block has run,
its place is filled for the next block that has none, in the order in which blocks run and from the
last one to the first of the next token. The parameters of a block are views into its place while it
runs, and empty otherwise. Numbers are those of the model in memory, bit for bit: only where weights
lie differs.

Threads fill places. On the CPU they read a block's weights from the model's safetensors files into
its place. On another device they are copied there from pinned host memory, on a stream of their
own: the stream waits until the block that had the place before has computed, and the computation
waits for the copy. Where all blocks fit into host memory they are read once; of the others each
place has a staging buffer, which a file is read into while the device works.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from plait._torch.modules import own_parameters
from plait.cluster import accelerator, huge_pages
from plait.cluster.host_memory import free_host_bytes
from plait.errors import CheckpointError
from plait.inference import reading
from plait.inference.adapters import is_adapters
from plait.inference.daemon_threads import DaemonThreads
from plait.inference.reading import LEAST, PAGE, FileReader, Image, Part
from plait.inference.stored import Stored

SLOTS = 2
"""The weights that a block computes with, and those that are brought meanwhile."""
_ALIGNED = 64
SAME_BITS = 16
"""Bytes: a product of one row has the bits that it has in memory where its weight begins at a
multiple of these.
"""
_BETWEEN = 1 << 20
"""Bytes of a place at most that lie between tensors and hold none."""
_UNIT = 1 << 20
"""Bytes of the smallest stretch of pinned memory."""


@dataclass
class _Streamed:
    """A parameter of a block."""

    owner: nn.Module = field(repr=False)
    leaf: str
    stored: Stored
    start: int
    """Bytes from the beginning of its place."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory, in one stretch or several."""

    chunks: Sequence[torch.Tensor]
    """uint8."""

    @classmethod
    def pinned(cls, size: int) -> HostMemory:
        """At least `size` bytes. torch rounds each pinned tensor up to a power of two, so several
        of such sizes take the place of one.
        """
        units = -(-size // _UNIT)
        return cls(
            [
                torch.empty(_UNIT << bit, dtype=torch.uint8, pin_memory=True)
                for bit in range(units.bit_length())
                if units >> bit & 1
            ]
        )

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(chunk.numel() for chunk in self.chunks)

    def pieces(self, start: int, size: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The bytes from `start` on, as (first byte, uint8 tensor) of each stretch."""
        begin = 0
        for chunk in self.chunks:
            low = max(start, begin)
            high = min(start + size, begin + chunk.numel())
            if low < high:
                yield low, chunk[low - begin : high - begin]
            begin += chunk.numel()


@dataclass
class _Slot:
    """A place for the weights of a block, where it computes."""

    place: torch.Tensor
    """uint8."""
    staging: HostMemory | None
    """What files are read into: `place` itself on the CPU. None where no file is read after the
    start.
    """
    copied: torch.Event | None = None
    """After the last copy into the place. These are None on the CPU, and before there was one."""
    used: torch.Event | None = None
    """After the last computation with it."""


class WeightStream:
    """Of one process. Owns threads, the files and the places; `close` ends them."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        stored: Mapping[str, Stored],
        *,
        device: torch.device | None = None,
        on_host: Collection[str] = (),
    ) -> None:
        """`blocks` are streamed, in the order in which they run; the parameters of each are in
        `stored` by their names. They compute on `device` (the CPU). Those `on_host` are kept in
        pinned host memory, for a device besides the CPU.
        """
        self.blocks = tuple(blocks)
        self._device = device or torch.device("cpu")
        self._copies = (
            accelerator.new_stream(self._device) if accelerator.is_one(self._device) else None
        )
        self._parts = [
            _parts(model, block, stored, on_cpu=self._copies is None) for block in self.blocks
        ]
        self._sizes = [_place_bytes(parts) for parts in self._parts]
        self.slot_bytes = max(self._sizes)
        paths = {one.stored.path for parts in self._parts for one in parts}
        size = sum(
            size for name, size in zip(self.blocks, self._sizes, strict=True) if name not in on_host
        )
        self._files = FileReader(paths, largest=self.slot_bytes, keeps=not comes_from_disk(size))
        self._counting = threading.Lock()
        self.bytes_read = 0
        self._kept = {
            index: HostMemory.pinned(self._sizes[index])
            for index, name in enumerate(self.blocks)
            if name in on_host
        }
        for index, memory in self._kept.items():
            self._read(index, memory)
        reads = len(self._kept) < len(self.blocks)
        self._slots = [self._slot(reads=reads) for _ in range(min(SLOTS, len(self.blocks)))]
        self._free = list(range(len(self._slots)))
        self._reader = DaemonThreads(SLOTS, "plait-weights")
        self._coming: dict[int, tuple[Future[None], int]] = {}
        self.handles = []
        for index, name in enumerate(self.blocks):
            block = model.get_submodule(name)
            self._unbind(index)
            self.handles.append(
                block.register_forward_pre_hook(lambda *_, index=index: self._before(index))
            )
            self.handles.append(
                block.register_forward_hook(
                    lambda *_, index=index: self._after(index), always_call=True
                )
            )
        self._ahead(0)

    @property
    def memory_bytes(self) -> int:
        """Of the places for weights, where blocks compute."""
        return len(self._slots) * self.slot_bytes

    @property
    def host_bytes(self) -> int:
        """Of pinned host memory."""
        if self._copies is None:
            return 0
        staged = [slot.staging for slot in self._slots if slot.staging is not None]
        return sum(memory.size for memory in (*staged, *self._kept.values()))

    def close(self) -> None:
        """End the threads; the model cannot run afterwards."""
        self._files.end()
        self._reader.shutdown(wait=not self._files.is_stuck, cancel_futures=True)
        self._files.close()
        if self._copies is not None:
            # before the memory that it copies from and to is anybody else's
            self._copies.synchronize()
        for handle in self.handles:
            handle.remove()

    def _slot(self, *, reads: bool) -> _Slot:
        if self._copies is None:
            place = huge_pages.empty((self.slot_bytes,), torch.uint8)
            return _Slot(place, HostMemory([place]))
        place = torch.empty(self.slot_bytes, dtype=torch.uint8, device=self._device)
        # The copies have a stream of their own, which knows nothing of what this memory was used
        # for before.
        before = accelerator.current_stream(self._device).record_event()
        return _Slot(place, HostMemory.pinned(self.slot_bytes) if reads else None, used=before)

    def _before(self, index: int) -> None:
        if index not in self._coming:  # another order than the one that was brought ahead
            for other in list(self._coming):
                self._wait(other)
                self._release(other)
            self._ahead(index)
        slot = self._slots[self._wait(index)]
        if slot.copied is not None:
            accelerator.current_stream(self._device).wait_event(slot.copied)
        self._bind(index, slot.place)

    def _after(self, index: int) -> None:
        self._unbind(index)
        if index not in self._coming:  # it could not be brought
            return
        if self._copies is not None:
            self._slots[self._coming[index][1]].used = accelerator.current_stream(
                self._device
            ).record_event()
        if self._release(index):
            self._ahead(index + 1)

    def _release(self, index: int) -> bool:
        """Give the place of a block free, also of one that could not be read; not while it is being
        written to.
        """
        future, slot = self._coming[index]
        if not future.done():
            return False
        del self._coming[index]
        self._free.append(slot)
        return future.exception() is None

    def _wait(self, index: int) -> int:
        """The place that a block's weights are in, or are being copied to."""
        future, slot = self._coming[index]
        while True:
            try:
                future.result(timeout=reading.PATIENCE_SECONDS / 8)
                return slot
            except Late:
                oldest = self._files.oldest
                if oldest is not None and oldest[0] > reading.PATIENCE_SECONDS:
                    raise CheckpointError(
                        f"{oldest[1].path}: the weights of {self.blocks[index]} are waited for, and"
                        f" no bytes have come for {reading.PATIENCE_SECONDS:.0f} s from byte"
                        f" {oldest[1].low:,} on; look at the disk"
                    ) from None

    def _ahead(self, first: int) -> None:
        """Bring the blocks from `first` on, as many as there are places for."""
        for step in range(len(self.blocks)):
            if not self._free:
                return
            index = (first + step) % len(self.blocks)
            if index in self._coming:
                continue
            slot = self._free.pop()
            if index in self._kept:
                # No file is read, so this only enqueues copies. A thread would have to wait for
                # Python's lock first, and the link would be idle meanwhile.
                self._bring(index, self._slots[slot])
                copied: Future[None] = Future()
                copied.set_result(None)
            else:
                copied = self._reader.submit(self._bring, index, self._slots[slot])
            self._coming[index] = copied, slot

    def _bind(self, index: int, place: torch.Tensor) -> None:
        for one in self._parts[index]:
            stored = one.stored
            assert stored.dtype is not None
            parameter = own_parameters(one.owner)[one.leaf]
            assert parameter is not None
            parameter.data = (
                place[one.start : one.start + stored.size].view(stored.dtype).view(stored.shape)
            )

    def _unbind(self, index: int) -> None:
        for one in self._parts[index]:
            parameter = own_parameters(one.owner)[one.leaf]
            assert parameter is not None
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)

    def _bring(self, index: int, slot: _Slot) -> None:
        kept = self._kept.get(index)
        if kept is None:
            assert slot.staging is not None
            if slot.copied is not None:
                slot.copied.synchronize()  # the copy of the block that was read there before
            self._read(index, slot.staging)
        source = slot.staging if kept is None else kept
        if self._copies is None or source is None:
            return
        if slot.used is not None:
            self._copies.wait_event(slot.used)
        with accelerator.on_stream(self._copies):
            for start, piece in source.pieces(0, self._sizes[index]):
                slot.place[start : start + piece.numel()].copy_(piece, non_blocking=True)
        slot.copied = self._copies.record_event()

    def _read(self, index: int, memory: HostMemory) -> None:
        parts = self._parts[index]
        image = None
        if (
            self._copies is None
            and (low := _low(parts)) is not None
            and not memory.chunks[0].data_ptr() % PAGE
        ):
            image = Image(low, *memory.chunks)
        self._files.read(
            [
                Part(one.stored, start - one.start, piece)
                for one in parts
                for start, piece in memory.pieces(one.start, one.stored.size)
            ],
            image,
        )
        with self._counting:
            self.bytes_read += sum(one.stored.size for one in parts)


def comes_from_disk(total: int) -> bool:
    """Whether the kernel cannot keep `total` bytes of files in its cache."""
    free = free_host_bytes()
    return free is not None and total > free


def brought(model: nn.Module, block: str) -> dict[str, nn.Parameter]:
    """Of the parameters of a block, those that are streamed with it, by their names in it: an
    adapter's stay.
    """
    return {
        name: one
        for name, one in model.get_submodule(block).named_parameters()
        if not is_adapters(f"{block}.{name}")
    }


def pinned_bytes(size: int) -> int:
    """What `size` bytes take in pinned memory."""
    return -(-size // _UNIT) * _UNIT


def block_bytes(model: nn.Module, block: str, stored: Mapping[str, Stored], *, on_cpu: bool) -> int:
    """What the place of a block takes where it computes."""
    return _place_bytes(_parts(model, block, stored, on_cpu=on_cpu))


def _place_bytes(parts: Sequence[_Streamed]) -> int:
    """Whole pages where files are read so."""
    size = max((one.start + one.stored.size for one in parts), default=0)
    return size if size < LEAST else -(-size // PAGE) * PAGE


def _parts(
    model: nn.Module, block: str, stored: Mapping[str, Stored], *, on_cpu: bool
) -> list[_Streamed]:
    """The parameters of a block and where they lie in its place: on the CPU as in the file, where
    that gives the same numbers, else close together.
    """
    found = []
    start = 0
    for name in brought(model, block):
        owner, _, leaf = f"{block}.{name}".rpartition(".")
        one = stored[f"{block}.{name}"]
        found.append(_Streamed(model.get_submodule(owner), leaf, one, start))
        start += -(-one.size // _ALIGNED) * _ALIGNED
    if not on_cpu or start < LEAST:
        return found
    if len({one.stored.path for one in found}) > 1 or any(
        one.stored.offset % SAME_BITS for one in found
    ):
        return found
    low = min(one.stored.offset for one in found) // PAGE * PAGE
    ends = max(one.stored.offset + one.stored.size for one in found) - low
    # they overlap, as where there is no file yet, or lie apart
    if not sum(one.stored.size for one in found) <= ends <= start + _BETWEEN:
        return found
    return [replace(one, start=one.stored.offset - low) for one in found]


def _low(parts: Sequence[_Streamed]) -> int | None:
    """The byte of the file that their place begins with; None where they lie otherwise than in the
    file.
    """
    lows = {(one.stored.path, one.stored.offset - one.start) for one in parts}
    low = next(iter(lows), (None, 1))[1]
    return low if len(lows) == 1 and low % PAGE == 0 else None
