"""Where a block's saved tensors live between forward and backward: by default where autograd puts
them; a slice on each rank of the tp axis; or in a store (host memory, disk).

Only what the block alone keeps is moved. Parameters, buffers and tensors that all blocks share
(masks, rotary tables) stay: moving a copy of them would free nothing. Tensors that are saved more
than once, or as views of one storage, are moved once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from plait._torch.dtensor import local_tensor
from plait._torch.modules import own_parameters
from plait._torch.operators import FakeTensor, tree_leaves
from plait._torch.storage import storage_id, version_of
from plait.comm.collectives import all_gather_dim, shard_range
from plait.parallel.hooks import Lost, StepHook

_PLAIN = (torch.Tensor, FakeTensor)
"""Other subclasses know what their storage means; they stay."""
LEAST_BYTES = 1024
"""Smaller tensors stay: a copy costs more than it frees."""


class Group(Protocol):
    """What one call of one block put into a store."""

    def put(self, flat: torch.Tensor) -> Any:
        """Take over a one-dimensional tensor; returns what `get` wants."""

    def get(self, handle: Any) -> torch.Tensor:
        """The same values again, on the device. May be called more than once."""


class Store(Protocol):
    """A place for saved tensors."""

    def begin(self) -> None:
        """Another forward begins; needed where one may begin before the backward of the last."""

    def open(self, index: int) -> Group:
        """A group for block `index`; groups of one forward are opened in the order of its
        blocks.
        """

    def prefetcher(self) -> Callable[[], None]:
        """Starts the prefetch of the group that was opened last."""

    def drain(self) -> None:
        """Wait until all that was put has left the device's memory."""

    def close(self) -> None:
        """Nothing is put there any more: end threads, free what waits to be used again."""


class OffloadedActivations(StepHook):
    """The first `blocks` blocks of a rank put what they save into `store`."""

    def __init__(self, store: Store, blocks: int) -> None:
        self.store = store
        self.blocks = blocks

    def on_error(self, lost: Lost) -> None:
        """What the failed step put there is forgotten."""
        self.store.begin()

    def close(self) -> None:
        """Nothing is put there any more."""
        self.store.close()


@dataclass(frozen=True)
class _Whole:
    """A tensor in a store: a view of a storage that was put there."""

    entry: _Entry
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Entry:
    """A storage in a store. Its tensor is kept alive only while something uses it."""

    group: Group
    handle: Any
    source: weakref.ref[torch.UntypedStorage]
    """What was put there: the address of a storage that is gone is given to others."""
    version: int
    last: weakref.ref[torch.Tensor] | None = None
    """The prefetched bytes, while anything uses them: several views share one copy."""


@dataclass(frozen=True)
class _Slice:
    """A rank's part of a tensor that is the same on every rank of `process_group`."""

    part: torch.Tensor | _Whole
    shape: torch.Size


class SavedTensors:
    """The hooks of one block."""

    def __init__(
        self, block: nn.Module, *, store: Store | None, partition: ProcessGroup | None, index: int
    ) -> None:
        self._block = block
        self._store = store
        self._partition = partition
        self._index = index

    @property
    def needed(self) -> bool:
        """Whether anything is moved."""
        return self._store is not None or self._partition is not None

    def hooks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        """Hooks for one call of the block with these arguments. The first argument (or
        `hidden_states`) is the block's own, the other tensors are shared.
        """
        hidden = args[0] if args else kwargs.get("hidden_states")
        own = _storage(hidden) if isinstance(hidden, torch.Tensor) else None
        shared = {
            _storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        } - {own}
        shared |= {
            _storage(local_tensor(tensor))
            for tensor in (*self._block.parameters(), *self._block.buffers())
        }
        group = self._store.open(self._index) if self._store is not None else None
        entries: dict[int, _Entry] = {}
        units = [
            module
            for module in self._block.modules()
            if isinstance(module, FSDPModule) and module is not self._block
        ]

        def into_store(tensor: torch.Tensor) -> Any:
            if group is None:
                return tensor
            key = _storage(tensor)
            storage = tensor.untyped_storage()
            entry = entries.get(key)
            if (
                entry is None
                or entry.source() is not storage
                or entry.version != version_of(tensor)
            ):
                flat = (
                    tensor.detach()
                    .as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
                    .view(torch.uint8)
                )
                entry = entries[key] = _Entry(
                    group, group.put(flat), weakref.ref(storage), version_of(tensor)
                )
            return _Whole(
                entry, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
            )

        def pack(tensor: torch.Tensor) -> Any:
            if (
                type(tensor) not in _PLAIN
                or _storage(tensor) in shared
                or tensor.untyped_storage().nbytes() < LEAST_BYTES
            ):
                return tensor
            if any(
                _storage(tensor) == _storage(weight) for unit in units for weight in _gathered(unit)
            ):
                return tensor
            if self._partition is not None and _storage(tensor) == own and tensor.is_contiguous():
                start, size = shard_range(tensor.numel(), self._partition)
                part = tensor.detach().reshape(-1).narrow(0, start, size).clone()
                return _Slice(into_store(part), tensor.shape)
            return into_store(tensor)

        return saved_tensors_hooks(pack, self._unpack)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _Slice):
            assert self._partition is not None
            part = self._unpack(packed.part)
            return all_gather_dim(part, self._partition, dim=0, length=packed.shape.numel()).view(
                packed.shape
            )
        if isinstance(packed, _Whole):
            return _from_store(packed)
        return packed


def _gathered(unit: nn.Module) -> list[torch.Tensor]:
    """What a unit of its own inside of the block computes with: gathered after the block's forward
    has begun.
    """
    held = (*own_parameters(unit).values(), *vars(unit).values())
    return [local_tensor(tensor) for tensor in held if isinstance(tensor, torch.Tensor)]


def _from_store(packed: _Whole) -> torch.Tensor:
    entry = packed.entry
    flat = entry.last() if entry.last is not None else None
    if flat is None:
        flat = entry.group.get(entry.handle)
        entry.last = weakref.ref(flat)
    whole = flat[: flat.numel() // packed.dtype.itemsize * packed.dtype.itemsize].view(packed.dtype)
    return whole.as_strided(packed.size, packed.stride, packed.offset)


def _storage(tensor: torch.Tensor) -> int:
    return storage_id(tensor.untyped_storage())
