"""Streaming of weights: each block's weights are copied to its device just before it runs.

Note [Slots of streamed weights]
    There are `SLOTS` slots: memory for the weights of a block on the device where the model
    computes. When a block has run, its slot is filled for the next block without a slot, in the
    order in which blocks run. The last block of a token is followed by the first block of the next
    token. The parameters of a block are views of its slot while it runs, and empty otherwise.
    Results are those of the model in memory, bit for bit, because only the place of the weights
    differs.

Note [Order of copies]
    Threads fill slots. On the CPU they read a block's weights from the model's files to its slot.
    On another device the weights are copied there from pinned host memory, on a separate stream.
    That stream waits (event `used`) until the block that had the slot before has computed, and the
    computation waits (event `copied`) for the copy. Blocks that fit into host memory are read once.
    For the remaining blocks, each slot has a staging buffer that is filled from files while the
    device computes. The buffer is filled again only after the last copy from it has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from plait._torch.modules import direct_parameters
from plait.cluster import accelerator, host_memory
from plait.cluster.host_memory import free_host_bytes
from plait.errors import CheckpointError
from plait.inference import weight_files
from plait.inference.adapters import is_adapters
from plait.inference.weight_files import (
    MIN_DIRECT_LAYER_BYTES,
    PAGE,
    DaemonThreads,
    FileImage,
    FileReader,
    StoredTensor,
    TensorPart,
)
from plait.parallel.hooks import StepHook

SLOTS = 2
"""Number of slots: one with which a block computes, and one that is filled at the same time."""
WEIGHT_ALIGNMENT = 16
"""Alignment of weights in bytes at which a product of one row has the same bits as in memory."""
_SLOT_ALIGNMENT = 64
"""Alignment of parameters in a slot, in bytes."""
_MAX_UNUSED_BYTES = 1 << 20
"""Largest number of bytes between the tensors of a slot with the layout of a file."""
_MIN_CHUNK_BYTES = 1 << 20
"""Size of the smallest chunk of pinned memory."""


@dataclass
class _StreamedParameter:
    """Parameter of a block, and its place in the block's slot."""

    owner: nn.Module = field(repr=False)
    leaf: str
    stored: StoredTensor
    start: int
    """Offset of the first byte in the slot."""


@dataclass(frozen=True)
class HostMemory:
    """Host memory that consists of one or several chunks."""

    chunks: Sequence[torch.Tensor]
    """Chunks: uint8, on the CPU."""

    @classmethod
    def pinned(cls, size: int) -> HostMemory:
        """Allocate at least `size` bytes of pinned memory.

        torch rounds each pinned tensor up to a power of two, so several tensors of such sizes are
        used instead of one.
        """
        units = -(-size // _MIN_CHUNK_BYTES)
        chunks = []
        for bit in range(units.bit_length()):
            if units >> bit & 1:
                chunk_bytes = _MIN_CHUNK_BYTES << bit
                chunks.append(torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=True))
        return cls(chunks)

    @property
    def size(self) -> int:
        """Number of bytes."""
        return sum(chunk.numel() for chunk in self.chunks)

    def overlaps(self, start: int, size: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of the first byte, uint8 tensor) of each chunk's part of a byte range."""
        begin = 0
        for chunk in self.chunks:
            low = max(start, begin)
            high = min(start + size, begin + chunk.numel())
            if low < high:
                yield low, chunk[low - begin : high - begin]
            begin += chunk.numel()


@dataclass
class _Slot:
    """Device memory for the weights of a block."""

    place: torch.Tensor
    """Memory of the slot: uint8."""
    staging: HostMemory | None
    """Memory that files are read to: `place` itself on the CPU.

    It is None if no file is read after the start.
    """
    # The events are None on the CPU. See Note [Order of copies].
    copied: torch.Event | None = None
    """Event after the last copy to the slot, or None if there was none."""
    used: torch.Event | None = None
    """Event after the last computation with the slot."""


class WeightStream(StepHook):
    """Stream of the weights of some blocks of a model in one process.

    See Note [Slots of streamed weights] and Note [Order of copies]. The object owns threads, files
    and slots. It is a hook of the model, so that it is closed together with the model.

    Args:
        model: The model.
        blocks: Names of the streamed blocks, in the order in which they run.
        stored: Locations of their parameters, by full name.
        device: Device on which the blocks run. None means the CPU.
        on_host: Names of the blocks that are kept in pinned host memory.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        stored: Mapping[str, StoredTensor],
        *,
        device: torch.device | None = None,
        on_host: Collection[str] = (),
    ) -> None:
        self.blocks = tuple(blocks)
        self._device = device or torch.device("cpu")
        # None on the CPU, where files are read to the slots.
        self._copies: torch.Stream | None = None
        if accelerator.is_accelerator(self._device):
            self._copies = accelerator.new_stream(self._device)

        on_cpu = self._copies is None
        self._parameters = [
            _place_parameters(model, block, stored, on_cpu=on_cpu) for block in self.blocks
        ]
        self._sizes = [_slot_size(parameters) for parameters in self._parameters]
        self.slot_bytes = max(self._sizes)
        """Size of a slot."""
        self._files = self._open_files(on_host)
        self._count_lock = threading.Lock()
        self.bytes_read = 0
        """Number of bytes that have been read from files."""
        self._pinned_blocks: dict[int, HostMemory] = {}
        for index, name in enumerate(self.blocks):
            if name in on_host:
                self._pinned_blocks[index] = HostMemory.pinned(self._sizes[index])
                self._read(index, self._pinned_blocks[index])

        reads_later = len(self._pinned_blocks) < len(self.blocks)
        slot_count = min(SLOTS, len(self.blocks))
        self._slots = [self._new_slot(reads_later=reads_later) for _ in range(slot_count)]
        self._free = list(range(slot_count))
        self._threads = DaemonThreads(SLOTS, "plait-weights")
        self._coming: dict[int, tuple[Future[None], int]] = {}
        """Read or copy of every block that has a slot, and the index of the slot."""
        self.handles: list[RemovableHandle] = []
        for index, name in enumerate(self.blocks):
            self._unbind(index)
            self._register_hooks(index, model.get_submodule(name))
        self._prefetch(0)

    def _open_files(self, on_host: Collection[str]) -> FileReader:
        paths: set[Path] = set()
        for parameters in self._parameters:
            paths.update(parameter.stored.path for parameter in parameters)
        # Blocks on the host are read once, so only the others compete for the kernel's cache.
        reread = 0
        for name, size in zip(self.blocks, self._sizes, strict=True):
            if name not in on_host:
                reread += size
        return FileReader(paths, largest=self.slot_bytes, keeps=not comes_from_disk(reread))

    def _register_hooks(self, index: int, block: nn.Module) -> None:
        self.handles.append(block.register_forward_pre_hook(lambda *_: self._before(index)))
        # Also after an error in the block, so that its slot becomes free.
        self.handles.append(
            block.register_forward_hook(lambda *_: self._after(index), always_call=True)
        )

    @property
    def host_bytes(self) -> int:
        """Size of all pinned host memory."""
        if self._copies is None:
            return 0
        memories = list(self._pinned_blocks.values())
        memories += [slot.staging for slot in self._slots if slot.staging is not None]
        return sum(memory.size for memory in memories)

    def close(self) -> None:
        """End the threads and close the files. The model cannot run afterwards."""
        self._files.end()
        self._threads.shutdown(wait=self._files.stuck_block is None, cancel_futures=True)
        self._files.close()
        if self._copies is not None:
            # Before its source and destination memory can be used for something else.
            self._copies.synchronize()
        for handle in self.handles:
            handle.remove()

    def _new_slot(self, *, reads_later: bool) -> _Slot:
        if self._copies is None:
            place = host_memory.empty_on_huge_pages((self.slot_bytes,), torch.uint8)
            return _Slot(place, HostMemory([place]))
        place = torch.empty(self.slot_bytes, dtype=torch.uint8, device=self._device)
        # The stream of copies does not know what this memory was used for before.
        before = accelerator.current_stream(self._device).record_event()
        staging = HostMemory.pinned(self.slot_bytes) if reads_later else None
        return _Slot(place, staging, used=before)

    def _before(self, index: int) -> None:
        """Bind the weights of a block that is about to run."""
        if index not in self._coming:
            # The blocks run in another order than they were prefetched in.
            for other in list(self._coming):
                self._wait(other)
                self._release(other)
            self._prefetch(index)
        slot = self._slots[self._wait(index)]
        if slot.copied is not None:
            accelerator.current_stream(self._device).wait_event(slot.copied)
        self._bind(index, slot.place)

    def _after(self, index: int) -> None:
        """Release the slot of a block that has run, and fill it for the next one."""
        self._unbind(index)
        if index not in self._coming:  # its weights could not be read
            return
        if self._copies is not None:
            used = accelerator.current_stream(self._device).record_event()
            self._slots[self._coming[index][1]].used = used
        if self._release(index):
            self._prefetch(index + 1)

    def _release(self, index: int) -> bool:
        """Release the slot of a block, unless it is being written to.

        Returns:
            True if the weights had been read without an error.
        """
        future, slot = self._coming[index]
        if not future.done():
            return False
        del self._coming[index]
        self._free.append(slot)
        return future.exception() is None

    def _wait(self, index: int) -> int:
        """Wait until the weights of a block are in its slot, or are being copied to it.

        Returns:
            Index of the slot.

        Raises:
            CheckpointError: The weights cannot be read, or the disk does not answer.
        """
        future, slot = self._coming[index]
        while True:
            try:
                # A layer may take longer than any of its reads may, so the reads are checked.
                future.result(timeout=weight_files.PATIENCE_SECONDS / 8)
                return slot
            except FutureTimeout:
                block = self._files.stuck_block
                if block is not None:
                    raise CheckpointError(
                        f"{block.path}: the weights of {self.blocks[index]} have not arrived, and"
                        f" no bytes were read for {weight_files.PATIENCE_SECONDS:.0f} s from byte"
                        f" {block.low:,} on; check the disk"
                    ) from None

    def _prefetch(self, first: int) -> None:
        """Fill the free slots for the next blocks, starting with block `first`."""
        for step in range(len(self.blocks)):
            if not self._free:
                return
            index = (first + step) % len(self.blocks)
            if index in self._coming:
                continue
            slot = self._free.pop()
            if index in self._pinned_blocks:
                # No file is read, so this only enqueues copies. A thread would have to wait for
                # Python's lock first, and the link would be idle meanwhile.
                self._fill(index, self._slots[slot])
                filled: Future[None] = Future()
                filled.set_result(None)
            else:
                filled = self._threads.submit(self._fill, index, self._slots[slot])
            self._coming[index] = filled, slot

    def _bind(self, index: int, place: torch.Tensor) -> None:
        """Make the parameters of a block views of its slot."""
        for entry in self._parameters[index]:
            stored = entry.stored
            assert stored.dtype is not None
            parameter = direct_parameters(entry.owner)[entry.leaf]
            assert parameter is not None
            content = place[entry.start : entry.start + stored.size]
            parameter.data = content.view(stored.dtype).view(stored.shape)

    def _unbind(self, index: int) -> None:
        """Make the parameters of a block empty."""
        for entry in self._parameters[index]:
            parameter = direct_parameters(entry.owner)[entry.leaf]
            assert parameter is not None
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)

    def _fill(self, index: int, slot: _Slot) -> None:
        """Read the weights of a block into a slot, or enqueue their copy to it."""
        # See Note [Order of copies].
        source = self._pinned_blocks.get(index)
        if source is None:
            source = slot.staging
            assert source is not None
            if slot.copied is not None:
                # The staging buffer is the source of the last copy to this slot.
                slot.copied.synchronize()
            self._read(index, source)
        if self._copies is None:
            return
        if slot.used is not None:
            self._copies.wait_event(slot.used)
        with accelerator.on_stream(self._copies):
            for start, chunk in source.overlaps(0, self._sizes[index]):
                slot.place[start : start + chunk.numel()].copy_(chunk, non_blocking=True)
        slot.copied = self._copies.record_event()

    def _read(self, index: int, memory: HostMemory) -> None:
        """Read the weights of a block from files to host memory."""
        parameters = self._parameters[index]
        image = None
        low = _image_start(parameters)
        if self._copies is None and low is not None and not memory.chunks[0].data_ptr() % PAGE:
            image = FileImage(low, *memory.chunks)

        parts = []
        size = 0
        for parameter in parameters:
            size += parameter.stored.size
            for start, chunk in memory.overlaps(parameter.start, parameter.stored.size):
                parts.append(TensorPart(parameter.stored, start - parameter.start, chunk))
        self._files.read(parts, image)
        # Several threads read.
        with self._count_lock:
            self.bytes_read += size


def comes_from_disk(total: int) -> bool:
    """Return True if the kernel cannot keep `total` bytes of files in its cache."""
    # The cache can use the memory that is free.
    free = free_host_bytes()
    return free is not None and total > free


def streamed_parameters(model: nn.Module, block: str) -> dict[str, nn.Parameter]:
    """Return the parameters of a block that are streamed, by their names in the block.

    Parameters of adapters stay in memory.
    """
    streamed: dict[str, nn.Parameter] = {}
    for name, parameter in model.get_submodule(block).named_parameters():
        if not is_adapters(f"{block}.{name}"):
            streamed[name] = parameter
    return streamed


def pinned_bytes(size: int) -> int:
    """Return the bytes of pinned memory that `HostMemory.pinned` allocates."""
    return -(-size // _MIN_CHUNK_BYTES) * _MIN_CHUNK_BYTES


def block_bytes(
    model: nn.Module, block: str, stored: Mapping[str, StoredTensor], *, on_cpu: bool
) -> int:
    """Return the size of a slot for a block.

    Args:
        model: The model.
        block: Name of the block.
        stored: Locations of its parameters, by full name.
        on_cpu: Whether the block runs on the CPU.
    """
    return _slot_size(_place_parameters(model, block, stored, on_cpu=on_cpu))


def _slot_size(parameters: Sequence[_StreamedParameter]) -> int:
    size = max((entry.start + entry.stored.size for entry in parameters), default=0)
    if size < MIN_DIRECT_LAYER_BYTES:
        return size
    # Direct reads transfer complete pages.
    return -(-size // PAGE) * PAGE


def _place_parameters(
    model: nn.Module, block: str, stored: Mapping[str, StoredTensor], *, on_cpu: bool
) -> list[_StreamedParameter]:
    """Return the parameters of a block with their places in its slot.

    On the CPU they have the layout of the file if this does not change results. Otherwise they are
    adjacent.
    """
    parameters = []
    start = 0
    for name in streamed_parameters(model, block):
        owner, _, leaf = f"{block}.{name}".rpartition(".")
        tensor = stored[f"{block}.{name}"]
        parameters.append(_StreamedParameter(model.get_submodule(owner), leaf, tensor, start))
        start += -(-tensor.size // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
    if not on_cpu or start < MIN_DIRECT_LAYER_BYTES:
        return parameters

    tensors = [entry.stored for entry in parameters]
    if len({tensor.path for tensor in tensors}) > 1:
        return parameters
    if any(tensor.offset % WEIGHT_ALIGNMENT for tensor in tensors):
        return parameters
    low = min(tensor.offset for tensor in tensors) // PAGE * PAGE
    size = max(tensor.offset + tensor.size for tensor in tensors) - low
    # Tensors overlap if there is no file yet, and may lie far apart in a file.
    if not sum(tensor.size for tensor in tensors) <= size <= start + _MAX_UNUSED_BYTES:
        return parameters
    return [replace(entry, start=entry.stored.offset - low) for entry in parameters]


def _image_start(parameters: Sequence[_StreamedParameter]) -> int | None:
    """Return the offset in the file at which a slot begins.

    It is None if the slot does not have the layout of the file.
    """
    starts = {(entry.stored.path, entry.stored.offset - entry.start) for entry in parameters}
    if len(starts) != 1:
        return None
    _, low = starts.pop()
    return low if low % PAGE == 0 else None
