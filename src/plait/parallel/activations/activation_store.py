"""Stores for a block's saved tensors between forward and backward.

By default autograd keeps saved tensors on the device. `SavedTensors` splits them over the ranks of
the tp axis, or moves them to a store: pinned host memory (`HostStore`) or files (`DiskStore`).

Note [Life of an offloaded tensor]
    Each call of a block opens a group in the store. Saved tensors leave the device while the
    forward continues: copies to host memory run on a side stream, and threads write files. In the
    backward, the first access to a tensor of a block starts the prefetch of the previous block's
    tensors, so that they are on the device in time. A store changes no bit of a tensor.

    Files have no name (they are unlinked as soon as they are open), so a process that dies leaves
    nothing behind.

Note [Tensors that are moved]
    Only tensors that nothing but the block keeps alive are moved. Parameters, buffers and tensors
    that all blocks share (masks, rotary tables) stay: moving a copy of them would free nothing.
    Tensors that are saved more than once, or as views of one storage, are moved once.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from plait._torch.modules import direct_parameters
from plait._torch.operators import FakeTensor, tree_leaves
from plait._torch.tensors import local_tensor, memory_key, version_of
from plait.cluster import accelerator
from plait.comm.collectives import all_gather_dim, shard_range
from plait.errors import ModelError, PlaitError
from plait.files import require_folder
from plait.parallel.hooks import FailureScope, StepHook
from plait.sizes import MIB, format_bytes

LEAST_BYTES = 1024
"""Smallest size of a tensor that is moved. A smaller copy costs more than it frees."""


PENDING_BYTES = 256 * MIB
"""Limit of the bytes that wait to be written to files. The forward waits if it is exceeded."""


# Other subclasses give their storage a meaning of their own. They stay.
_MOVED_TYPES = (torch.Tensor, FakeTensor)


class SavedGroup(Protocol):
    """Tensors that one call of a block put into a store."""

    def put(self, flat: torch.Tensor) -> Any:
        """Store a one-dimensional tensor, and return a handle for `get`."""

    def get(self, handle: Any) -> torch.Tensor:
        """Return a tensor with the same values on the device. May be called more than once."""


class ActivationStore(Protocol):
    """Store for the tensors that blocks save for their backward."""

    def begin(self) -> None:
        """Begin another forward. Call this if the last forward's backward may not have begun."""

    def open(self, index: int) -> SavedGroup:
        """Open a group for block `index`. Groups are opened in the order of the blocks."""

    def prefetcher(self) -> Callable[[], None]:
        """Return a function that starts the prefetch of the group that was opened last."""

    def drain(self) -> None:
        """Wait until all stored tensors have left the device's memory."""

    def close(self) -> None:
        """End threads and free unused memory. Nothing may be stored afterwards."""


class OffloadedActivations(StepHook):
    """Step hook that resets the store of offloaded activations after an error, and closes it.

    Args:
        store: The store.
        blocks: Number of blocks of the rank, starting with the first, that use the store.
    """

    def __init__(self, store: ActivationStore, blocks: int) -> None:
        self.store = store
        self.blocks = blocks

    def on_error(self, lost: FailureScope) -> None:
        """Forget the groups of saved activations of the step that failed."""
        self.store.begin()

    def close(self) -> None:
        """Close the store."""
        self.store.close()


class SavedTensors:
    """Offloading of the saved tensors of one block. See Note [Tensors that are moved].

    Args:
        block: The block.
        store: Store of the saved tensors, or None.
        partition: Process group whose ranks each keep a part of the block's input, or None.
        index: Index of the block on this rank.
    """

    def __init__(
        self,
        block: nn.Module,
        *,
        store: ActivationStore | None,
        partition: ProcessGroup | None,
        index: int,
    ) -> None:
        self._block = block
        self._store = store
        self._partition = partition
        self._index = index

    @property
    def needed(self) -> bool:
        """True if any saved tensor of the block is moved."""
        return self._store is not None or self._partition is not None

    def hooks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return the saved-tensor hooks for one call of the block.

        Args:
            args: Positional arguments of the call. No other block uses the first one (or
                `hidden_states`). Other tensors may be arguments of several blocks.
            kwargs: Keyword arguments of the call.
        """
        hidden = args[0] if args else kwargs.get("hidden_states")
        input_storage = memory_key(hidden) if isinstance(hidden, torch.Tensor) else None
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        shared = {memory_key(tensor) for tensor in tensors} - {input_storage}
        for tensor in (*self._block.parameters(), *self._block.buffers()):
            shared.add(memory_key(local_tensor(tensor)))
        nested_units = []
        for module in self._block.modules():
            if isinstance(module, FSDPModule) and module is not self._block:
                nested_units.append(module)
        store: Callable[[torch.Tensor], Any] = _identity
        if self._store is not None:
            store = _StoredCall(self._store.open(self._index)).put

        def pack(tensor: torch.Tensor) -> Any:
            if not _is_movable(tensor, shared) or _is_parameter_of(tensor, nested_units):
                return tensor
            is_input = memory_key(tensor) == input_storage
            if self._partition is not None and is_input and tensor.is_contiguous():
                start, size = shard_range(tensor.numel(), self._partition)
                part = tensor.detach().reshape(-1).narrow(0, start, size).clone()
                return _PartitionedTensor(store(part), tensor.shape)
            return store(tensor)

        return saved_tensors_hooks(pack, self._unpack)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _PartitionedTensor):
            assert self._partition is not None
            part = self._unpack(packed.part)
            flat = all_gather_dim(part, self._partition, dim=0, length=packed.shape.numel())
            return flat.view(packed.shape)
        if isinstance(packed, _StoredView):
            return _from_store(packed)
        return packed


def _is_movable(tensor: torch.Tensor, shared: set[int]) -> bool:
    """Return True if offloading a tensor frees memory.

    Args:
        tensor: The saved tensor.
        shared: Storages that something other than the block keeps in memory.
    """
    if type(tensor) not in _MOVED_TYPES or memory_key(tensor) in shared:
        return False
    return tensor.untyped_storage().nbytes() >= LEAST_BYTES


def _is_parameter_of(tensor: torch.Tensor, units: Sequence[nn.Module]) -> bool:
    """Return True if the tensor is a parameter of one of the units, sharded or gathered."""
    # Units gather their parameters after the forward of the block has begun, so their storages are
    # not known before.
    for unit in units:
        for attribute in (*direct_parameters(unit).values(), *vars(unit).values()):
            if not isinstance(attribute, torch.Tensor):
                continue
            if memory_key(tensor) == memory_key(local_tensor(attribute)):
                return True
    return False


@dataclass(frozen=True)
class _PartitionedTensor:
    """This rank's part of a tensor that is equal on every rank of the partition's group."""

    part: torch.Tensor | _StoredView
    shape: torch.Size


@dataclass(frozen=True)
class _StoredView:
    """Saved tensor in a store: a view of a storage that was moved."""

    storage: _StoredStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class _StoredStorage:
    """Storage in a store. Its prefetched copy is kept alive only while something uses it.

    Attributes:
        group: Group of the store.
        handle: Handle of the bytes in the group.
        source: Storage that was moved. Addresses are reused, so an equal address does not prove
            that a tensor belongs to it.
        version: Version of the saved tensor. A later write makes the stored bytes stale.
        last: Prefetched bytes, which all views share.
    """

    group: SavedGroup
    handle: Any
    source: weakref.ref[torch.UntypedStorage]
    version: int
    last: weakref.ref[torch.Tensor] | None = None


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _StoredCall:
    """Saved tensors of one call of a block. A store receives each of their storages once."""

    def __init__(self, group: SavedGroup) -> None:
        self._group = group
        self._storages: dict[int, _StoredStorage] = {}

    def put(self, tensor: torch.Tensor) -> _StoredView:
        source = tensor.untyped_storage()
        stored = self._storages.get(memory_key(tensor))
        if stored is None or stored.source() is not source or stored.version != version_of(tensor):
            # The complete storage as bytes, so that all of its views find their elements in it.
            count = source.nbytes() // tensor.element_size()
            flat = tensor.detach().as_strided((count,), (1,), 0).view(torch.uint8)
            stored = _StoredStorage(
                self._group, self._group.put(flat), weakref.ref(source), version_of(tensor)
            )
            self._storages[memory_key(tensor)] = stored
        return _StoredView(
            storage=stored,
            dtype=tensor.dtype,
            size=tensor.size(),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )


def _from_store(packed: _StoredView) -> torch.Tensor:
    stored = packed.storage
    flat = stored.last() if stored.last is not None else None
    if flat is None:
        flat = stored.group.get(stored.handle)
        stored.last = weakref.ref(flat)
    # A storage may have a few bytes more than a multiple of the element size.
    usable_bytes = flat.numel() // packed.dtype.itemsize * packed.dtype.itemsize
    return (
        flat[:usable_bytes].view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)
    )


class _Store:
    """Store that links each group to the previous one of the same forward.

    The backward needs the tensors of the previous group next.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Index of a block, and its group. Only the packed tensors keep a group alive.
        self._last: tuple[int, weakref.ref[Any]] | None = None

    def begin(self) -> None:
        """Begin another forward. Its groups are not linked to groups that were opened before."""
        self._last = None

    def prefetcher(self) -> Callable[[], None]:
        """Return a function that starts the prefetch of the group that was opened last."""
        return partial(_prefetch, self._last[1] if self._last is not None else None)

    def _link(self, index: int, group: Any) -> None:
        """Link the group of block `index` to the previous group, if one exists."""
        if self._last is not None and self._last[0] < index:
            group.previous = self._last[1]
        self._last = (index, weakref.ref(group))


def _prefetch(reference: weakref.ref[Any] | None) -> None:
    """Start the prefetch of a group, if it still exists."""
    group = reference() if reference is not None else None
    if group is not None:
        group.prefetch()


class HostStore(_Store):
    """Store in pinned host memory.

    Buffers are reused by later micro-batches, also for tensors of about the same size, because
    lengths may differ from step to step. The buffers never take more memory than was in use at some
    earlier time.

    Attributes:
        device: Device of the saved tensors.
        offload_stream: Stream of copies to the host; None on a CPU.
        prefetch_stream: Stream of copies to the device; None on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.offload_stream: Any = None
        self.prefetch_stream: Any = None
        if accelerator.is_accelerator(device):
            self.offload_stream = accelerator.new_stream(device)
            self.prefetch_stream = accelerator.new_stream(device)
        # Unused buffers by their size, each with the event after which it has been read.
        self._free: defaultdict[int, list[tuple[torch.Tensor, Any]]] = defaultdict(list)
        self._total_bytes = 0
        self._used_bytes = 0
        self._peak_used_bytes = 0

    def open(self, index: int) -> HostGroup:
        """Open a group for one call of block `index`."""
        group = HostGroup(self)
        self._link(index, group)
        return group

    def drain(self) -> None:
        """Wait until all copies to the host are done."""
        if self.offload_stream is not None:
            self.offload_stream.synchronize()

    def close(self) -> None:
        """Free the unused buffers."""
        self._free_buffers(self._total_bytes)

    def buffer(self, size: int) -> torch.Tensor:
        """Return at least `size` bytes of host memory."""
        # torch rounds pinned memory to powers of 2 anyway.
        capacity = 1 << (size - 1).bit_length() if size else 0
        self._used_bytes += capacity
        self._peak_used_bytes = max(self._peak_used_bytes, self._used_bytes)
        if self._free[capacity]:
            buffer, was_read = self._free[capacity].pop()
            if self.offload_stream is not None:
                self.offload_stream.wait_event(was_read)
            return buffer
        self._free_buffers(self._total_bytes + capacity - self._peak_used_bytes)
        self._total_bytes += capacity
        return torch.empty(
            capacity, dtype=torch.uint8, pin_memory=accelerator.is_accelerator(self.device)
        )

    def _free_buffers(self, surplus: int) -> None:
        """Free `surplus` bytes of unused buffers, or all of them if there are fewer."""
        # No event is waited for: torch keeps pinned memory until copies that read it are done.
        for capacity in sorted(self._free, reverse=True):
            while surplus > 0 and self._free[capacity]:
                self._free[capacity].pop(0)
                self._total_bytes -= capacity
                surplus -= capacity

    def reuse(self, buffers: list[torch.Tensor]) -> None:
        """Make buffers available again once the current copies from them have ended."""
        was_read = None
        if self.prefetch_stream is not None:
            was_read = self.prefetch_stream.record_event()
        for buffer in buffers:
            self._used_bytes -= buffer.numel()
            self._free[buffer.numel()].append((buffer, was_read))


class HostGroup:
    """Tensors of one call of a block in host memory. See Note [Life of an offloaded tensor].

    Attributes:
        previous: Weak reference to the group of the previous block, or None.
    """

    def __init__(self, store: HostStore) -> None:
        self.previous: Any = None
        self._store = store
        self._buffers: list[torch.Tensor] = []
        # Stored tensors, as views of the buffers.
        self._values: list[torch.Tensor] = []
        self._offloaded: Any = None
        # Prefetched tensors that were not read yet, by handle.
        self._returned: dict[int, torch.Tensor] = {}
        self._arrived: Any = None
        self._prefetch_started = False
        weakref.finalize(self, store.reuse, self._buffers)

    def put(self, flat: torch.Tensor) -> int:
        """Copy a one-dimensional tensor to the host, and return its handle."""
        buffer = self._store.buffer(flat.numel())
        stream = self._store.offload_stream
        # The copy begins when the device has computed the tensor.
        if stream is not None:
            stream.wait_stream(accelerator.current_stream(self._store.device))
        with accelerator.on_stream(stream):
            self._values.append(buffer[: flat.numel()].copy_(flat, non_blocking=True))
        if stream is not None:
            # The allocator must not reuse the memory of `flat` before the copy is done.
            flat.record_stream(stream)
            self._offloaded = stream.record_event()
        self._buffers.append(buffer)
        return len(self._buffers) - 1

    def prefetch(self) -> None:
        """Start to copy all tensors of the group to the device."""
        if self._prefetch_started:
            return
        self._prefetch_started = True
        stream = self._store.prefetch_stream
        if stream is not None and self._offloaded is not None:
            stream.wait_event(self._offloaded)
        with accelerator.on_stream(stream):
            for index, value in enumerate(self._values):
                returned = torch.empty_like(value, device=self._store.device)
                self._returned[index] = returned.copy_(value, non_blocking=True)
        if stream is not None:
            self._arrived = stream.record_event()

    def get(self, handle: int) -> torch.Tensor:
        """Return a tensor on the device, and start the prefetch of the previous block."""
        self.prefetch()
        _prefetch(self.previous)
        flat = self._returned.pop(handle, None)
        if flat is None:
            # The tensor was read before, and the caller has its prefetched copy.
            value = self._values[handle]
            return torch.empty_like(value, device=self._store.device).copy_(value)
        if self._arrived is not None:
            current = accelerator.current_stream(self._store.device)
            current.wait_event(self._arrived)
            # The memory belongs to the prefetch stream and is now used on the current one.
            flat.record_stream(current)
        return flat


class DiskStore(_Store):
    """Store in unnamed files of a folder, which background threads write and read.

    Args:
        folder: Folder of the files.
        device: Device of the saved tensors.
        workers: Number of threads.
        pending_bytes: Limit of the bytes that wait to be written.

    Raises:
        PlaitError: The folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        workers: int = 2,
        pending_bytes: int = PENDING_BYTES,
    ) -> None:
        self.folder = folder
        super().__init__(device)
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="plait-activations")
        self._limit = pending_bytes
        self._pending = 0
        self._changed = threading.Condition()
        require_folder(folder, field="parallel.activation_offload.path")

    def open(self, index: int) -> DiskGroup:
        """Open a group for one call of block `index`."""
        group = DiskGroup(self)
        self._link(index, group)
        return group

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown()

    def wait_for_room(self, size: int) -> None:
        """Wait until `size` more bytes may be queued, and reserve them."""
        with self._changed:
            # A tensor above the limit waits until no other is queued.
            self._changed.wait_for(
                lambda: self._pending == 0 or self._pending + size <= self._limit
            )
            self._pending += size

    def drain(self) -> None:
        """Wait until everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending == 0)

    def written(self, size: int) -> None:
        """Subtract `size` bytes from those that wait to be written."""
        with self._changed:
            self._pending -= size
            self._changed.notify_all()

    def failed(self, error: OSError) -> DiskError:
        """Return the DiskError to raise for an OSError."""
        return DiskError(
            f"activations cannot be kept in {self.folder}: {error.strerror or error}; free some"
            " space there, name another folder in parallel.activation_offload.path, or lower"
            " parallel.activation_offload.fraction. No training state was touched"
        )


class DiskError(PlaitError):
    """Error of a write to a file of a `DiskStore`."""


@dataclass
class _Extent:
    """Range of a file that holds one tensor."""

    offset: int
    size: int
    write: Future[None]
    read: Future[torch.Tensor] | None = None


class DiskGroup:
    """Tensors of one call of a block, in one file. See Note [Life of an offloaded tensor].

    Attributes:
        previous: Weak reference to the group of the previous block, or None.
    """

    def __init__(self, store: DiskStore) -> None:
        self.previous: Any = None
        self._store = store
        self._file: Any = None
        self._extents: list[_Extent] = []
        self._end = 0
        self._prefetch_started = False

    def put(self, flat: torch.Tensor) -> int:
        """Queue a one-dimensional tensor to be written, and return its handle.

        The call waits if more than the limit is queued.

        Raises:
            DiskError: The file cannot be created, or an earlier tensor could not be written.
        """
        if self._file is None:
            folder = self._store.folder
            try:
                self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            except OSError as error:
                raise self._store.failed(error) from error
        # Errors of threads are raised as soon as possible, not in the backward only.
        for extent in self._extents:
            if extent.write.done() and isinstance(extent.write.exception(), DiskError):
                extent.write.result()
        size = flat.numel()
        self._store.wait_for_room(size)
        host, event = _to_host(flat)
        del flat
        written = self._store.pool.submit(
            _write, self._store, self._file, self._end, [host], event, version_of(host)
        )
        self._extents.append(_Extent(self._end, size, written))
        self._end += size
        return len(self._extents) - 1

    def prefetch(self) -> None:
        """Start to read all tensors of the group."""
        if self._prefetch_started:
            return
        self._prefetch_started = True
        for extent in self._extents:
            extent.read = self._store.pool.submit(_read, self._store, self._file, extent)

    def get(self, handle: int) -> torch.Tensor:
        """Return a tensor on the device, and start the prefetch of the previous block."""
        self.prefetch()
        _prefetch(self.previous)
        extent = self._extents[handle]
        if extent.read is None:
            # The tensor was read before, and the caller has its prefetched copy.
            return _read(self._store, self._file, extent).to(self._store.device)
        host = extent.read.result()
        extent.read = None
        return host.to(self._store.device)


def _to_host(flat: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return (bytes in host memory, event after which they are complete)."""
    if not accelerator.is_accelerator(flat.device):
        return flat, None
    host = torch.empty_like(flat, device="cpu", pin_memory=True)
    host.copy_(flat, non_blocking=True)
    return host, accelerator.current_stream(flat.device).record_event()


def _write(
    store: DiskStore, file: Any, offset: int, host: list[torch.Tensor], event: Any, version: int
) -> None:
    """Write a tensor.

    Args:
        store: Store that counts pending bytes.
        file: The file.
        offset: Offset in the file.
        host: List with the tensor. It is emptied, so that the memory is free before
            `store.written` is called.
        event: Event after which the tensor is complete, or None.
        version: Version of the tensor when it was saved.

    Raises:
        ModelError: The tensor was modified in the meantime. The error is raised where the tensor is
            read.
    """
    data = host.pop()
    size = data.numel()
    remaining = memoryview(data.numpy())  # type: ignore[arg-type]
    try:
        if event is not None:
            event.synchronize()
        while remaining:
            count = os.pwrite(file.fileno(), remaining, offset)
            remaining = remaining[count:]
            offset += count
        if version_of(data) != version:
            raise ModelError(
                "a tensor that a block with parallel.activation_offload saved for its backward was"
                " modified in place before it was stored, so its gradients would be wrong (torch"
                " refuses the same without offload); use an operation that is not in place"
            )
    except OSError as error:
        raise store.failed(error) from error
    finally:
        del data, remaining
        store.written(size)


def _read(store: DiskStore, file: Any, extent: _Extent) -> torch.Tensor:
    """Wait until a tensor has been written, and read it into host memory."""
    extent.write.result()
    host = torch.empty(
        extent.size, dtype=torch.uint8, pin_memory=accelerator.is_accelerator(store.device)
    )
    remaining = memoryview(host.numpy())  # type: ignore[arg-type]
    offset = extent.offset
    while remaining:
        count = os.preadv(file.fileno(), [remaining], offset)
        if not count:
            raise PlaitError(
                f"a file of activations in {store.folder} ended {format_bytes(len(remaining))} too"
                " early; check the disk for errors"
            )
        remaining = remaining[count:]
        offset += count
    return host
