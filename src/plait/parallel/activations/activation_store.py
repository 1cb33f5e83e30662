"""Stores for saved tensors: pinned host memory, reached by copies on a side stream, and files,
reached by threads.

Stored tensors leave the device while the forward continues; in the backward, the first access to a
tensor of a block starts the prefetch of the block before it. Files have no name (they are unlinked
as soon as they are open), so nothing is left behind by a process that dies. A store changes no bit
of what it holds.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from plait._torch.storage import version_of
from plait.cluster import accelerator
from plait.errors import ModelError, PlaitError
from plait.parallel.offload.folders import require_writable
from plait.units import MIB, format_bytes

PENDING_BYTES = 256 * MIB
"""The most that waits to be written to files. Forward waits when more would."""


class _Chain:
    """Groups know the one before them in the same forward, which backward wants after them."""

    def __init__(self) -> None:
        self._last: tuple[int, weakref.ref[Any]] | None = None

    def begin(self) -> None:
        """Another forward begins: of another micro-batch, or of another stage of a pipeline."""
        self._last = None

    def follow(self, index: int, group: Any) -> Any:
        """A weak reference to the group before, None for the first of a forward."""
        before = self._last[1] if self._last is not None and self._last[0] < index else None
        self._last = (index, weakref.ref(group))
        return before

    def prefetcher(self) -> Any:
        """A function that starts the prefetch of the group that was opened last."""
        group = self._last[1] if self._last is not None else None

        def prefetch() -> None:
            alive = group() if group is not None else None
            if alive is not None:
                alive.prefetch()

        return prefetch


class HostStore:
    """Pinned host memory. Buffers are used again by the next micro-batch, also by tensors of about
    their size: lengths may differ from step to step. What is held is never more than was once in
    use.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.chain = _Chain()
        self._free: defaultdict[int, list[tuple[torch.Tensor, Any]]] = defaultdict(list)
        self._held = self._used = self._most = 0
        """Bytes of all buffers, of those in use, and the most that were."""
        behind = accelerator.is_one(device)
        self.out = accelerator.new_stream(device) if behind else None
        self.back = accelerator.new_stream(device) if behind else None

    def begin(self) -> None:
        """Another forward begins: groups that were opened before are not prefetched ahead of those
        opened now.
        """
        self.chain.begin()

    def open(self, index: int) -> HostGroup:
        """For one call of a block."""
        group = HostGroup(self)
        group.before = self.chain.follow(index, group)
        return group

    def prefetcher(self) -> Any:
        """Starts the prefetch of the group that was opened last."""
        return self.chain.prefetcher()

    def drain(self) -> None:
        """Until all copies out are done."""
        if self.out is not None:
            self.out.synchronize()

    def close(self) -> None:
        """Free what nothing uses."""
        self._drop(self._held)

    def buffer(self, size: int) -> torch.Tensor:
        """`size` bytes of host memory or more: the next power of 2, to which torch rounds pinned
        memory anyway.
        """
        room = 1 << (size - 1).bit_length() if size else 0
        self._used += room
        self._most = max(self._most, self._used)
        if self._free[room]:
            buffer, read = self._free[room].pop()
            if self.out is not None:
                self.out.wait_event(read)
            return buffer
        self._drop(self._held + room - self._most)
        self._held += room
        return torch.empty(room, dtype=torch.uint8, pin_memory=accelerator.is_one(self.device))

    def _drop(self, surplus: int) -> None:
        """Free at least so many bytes that nothing uses; torch keeps pinned memory until copies
        that read it are done.
        """
        for room in sorted(self._free, reverse=True):
            while surplus > 0 and self._free[room]:
                self._free[room].pop(0)
                self._held -= room
                surplus -= room

    def reuse(self, buffers: list[torch.Tensor]) -> None:
        """They are used again once the copies that read them now are done."""
        read = self.back.record_event() if self.back is not None else None
        for buffer in buffers:
            self._used -= buffer.numel()
            self._free[buffer.numel()].append((buffer, read))


class HostGroup:
    """What one call of one block put there."""

    def __init__(self, store: HostStore) -> None:
        self.before: Any = None
        self._store = store
        self._buffers: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        """What was put, as views of the buffers."""
        self._left: Any = None
        self._returned: dict[int, torch.Tensor] = {}
        self._arrived: Any = None
        self._asked = False
        weakref.finalize(self, store.reuse, self._buffers)

    def put(self, flat: torch.Tensor) -> int:
        """Copy out, behind what the device is computing now."""
        buffer = self._store.buffer(flat.numel())
        stream = self._store.out
        if stream is not None:
            stream.wait_stream(accelerator.current_stream(self._store.device))
        with accelerator.on_stream(stream):
            self._values.append(buffer[: flat.numel()].copy_(flat, non_blocking=True))
        if stream is not None:
            flat.record_stream(stream)  # its memory is not given to others before the copy is done
            self._left = stream.record_event()
        self._buffers.append(buffer)
        return len(self._buffers) - 1

    def prefetch(self) -> None:
        """Start to copy everything back."""
        if self._asked:
            return
        self._asked = True
        stream = self._store.back
        if stream is not None and self._left is not None:
            stream.wait_event(self._left)
        with accelerator.on_stream(stream):
            self._returned = {
                index: (
                    torch.empty_like(value, device=self._store.device).copy_(
                        value, non_blocking=True
                    )
                )
                for index, value in enumerate(self._values)
            }
        if stream is not None:
            self._arrived = stream.record_event()

    def get(self, handle: int) -> torch.Tensor:
        """The tensor on the device; starts the prefetch of the block before."""
        self.prefetch()
        before = self.before() if self.before is not None else None
        if before is not None:
            before.prefetch()
        flat = self._returned.pop(handle, None)
        if flat is None:  # asked a second time
            value = self._values[handle]
            return torch.empty_like(value, device=self._store.device).copy_(value)
        if self._arrived is not None:
            current = accelerator.current_stream(self._store.device)
            current.wait_event(self._arrived)
            flat.record_stream(current)
        return flat


class DiskStore:
    """Files without a name in a folder, written and read by threads."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        workers: int = 2,
        pending_bytes: int = PENDING_BYTES,
    ) -> None:
        self.folder = folder
        self.device = device
        self.chain = _Chain()
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="plait-activations")
        self._limit = pending_bytes
        self._pending = 0
        self._room = threading.Condition()
        require_writable(folder, field="parallel.activation_offload.path")

    def begin(self) -> None:
        """Another forward begins: groups that were opened before are not prefetched ahead of those
        opened now.
        """
        self.chain.begin()

    def open(self, index: int) -> DiskGroup:
        """For one call of a block."""
        group = DiskGroup(self)
        group.before = self.chain.follow(index, group)
        return group

    def prefetcher(self) -> Any:
        """Starts the prefetch of the group that was opened last."""
        return self.chain.prefetcher()

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown()

    def wait_for_room(self, size: int) -> None:
        """Until `size` more bytes may wait to be written."""
        with self._room:
            self._room.wait_for(lambda: self._pending == 0 or self._pending + size <= self._limit)
            self._pending += size

    def drain(self) -> None:
        """Until nothing waits to be written."""
        with self._room:
            self._room.wait_for(lambda: self._pending == 0)

    def written(self, size: int) -> None:
        """`size` bytes wait no longer."""
        with self._room:
            self._pending -= size
            self._room.notify_all()

    def failed(self, error: OSError) -> DiskError:
        """What to tell."""
        return DiskError(
            f"activations cannot be kept in {self.folder}: {error.strerror or error}; free some"
            " space there, name another folder in parallel.activation_offload.path, or lower"
            " parallel.activation_offload.fraction. No training state was touched"
        )


class DiskError(PlaitError):
    """A file cannot be written."""


@dataclass
class _Extent:
    offset: int
    size: int
    write: Future[None]
    read: Future[torch.Tensor] | None = field(default=None)


class DiskGroup:
    """What one call of one block put there: one file."""

    def __init__(self, store: DiskStore) -> None:
        self.before: Any = None
        self._store = store
        self._file: Any = None
        self._extents: list[_Extent] = []
        self._end = 0
        self._asked = False

    def put(self, flat: torch.Tensor) -> int:
        """Write behind. Waits only where too much waits already."""
        if self._file is None:
            try:
                self._file = tempfile.TemporaryFile(dir=self._store.folder, buffering=0)  # noqa: SIM115
            except OSError as error:
                raise self._store.failed(error) from error
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
        extent = _Extent(self._end, size, written)
        self._extents.append(extent)
        self._end += size
        return len(self._extents) - 1

    def prefetch(self) -> None:
        """Start to read everything."""
        if self._asked:
            return
        self._asked = True
        for extent in self._extents:
            extent.read = self._store.pool.submit(_read, self._store, self._file, extent)

    def get(self, handle: int) -> torch.Tensor:
        """The tensor on the device; the block before starts to be read."""
        self.prefetch()
        before = self.before() if self.before is not None else None
        if before is not None:
            before.prefetch()
        extent = self._extents[handle]
        if extent.read is None:  # asked a second time
            return _read(self._store, self._file, extent).to(self._store.device)
        host = extent.read.result()
        extent.read = None
        return host.to(self._store.device)


def _to_host(flat: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The bytes in host memory, and the event after which they are there."""
    if not accelerator.is_one(flat.device):
        return flat, None
    host = torch.empty_like(flat, device="cpu", pin_memory=True)
    host.copy_(flat, non_blocking=True)
    return host, accelerator.current_stream(flat.device).record_event()


def _write(
    store: DiskStore, file: Any, offset: int, host: list[torch.Tensor], event: Any, version: int
) -> None:
    """`host` is emptied, so that the memory is free when `written` says so. Raises ModelError, told
    where the tensor is used, if it was written to meanwhile (`version`: as it was saved).
    """
    data = host.pop()
    size = data.numel()
    left = memoryview(data.numpy())  # type: ignore[arg-type]
    try:
        if event is not None:
            event.synchronize()
        while left:
            done = os.pwrite(file.fileno(), left, offset)
            left = left[done:]
            offset = offset + done
        if version_of(data) != version:
            raise ModelError(
                "a tensor that a block with parallel.activation_offload saved for its backward was"
                " modified in place before it was stored, so its gradients would be wrong (torch"
                " refuses the same without offload); use an operation that is not in place"
            )
    except OSError as error:
        raise store.failed(error) from error
    finally:
        del data, left
        store.written(size)


def _read(store: DiskStore, file: Any, extent: _Extent) -> torch.Tensor:
    extent.write.result()
    host = torch.empty(extent.size, dtype=torch.uint8, pin_memory=accelerator.is_one(store.device))
    left, offset = memoryview(host.numpy()), extent.offset  # type: ignore[arg-type]
    while left:
        done = os.preadv(file.fileno(), [left], offset)
        if not done:
            raise PlaitError(
                f"a file of activations in {store.folder} ended {format_bytes(len(left))} too"
                " early; is the disk sound?"
            )
        left = left[done:]
        offset = offset + done
    return host
