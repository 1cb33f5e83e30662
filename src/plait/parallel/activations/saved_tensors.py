"""Places of a block's saved tensors between forward and backward.

By default autograd keeps them. They can be moved to a slice on each rank of the tp axis, or to a
store (host memory, files).

Note [Tensors that are moved]
    Only tensors that nothing but the block keeps alive are moved. Parameters, buffers and tensors
    that all blocks share (masks, rotary tables) stay: moving a copy of them would free nothing.
    Tensors that are saved more than once, or as views of one storage, are moved once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
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
from plait._torch.storage import memory_key, version_of
from plait.comm.collectives import all_gather_dim, shard_range
from plait.parallel.hooks import FailureScope, StepHook

# Other subclasses give their storage a meaning of their own. They stay.
_MOVED_TYPES = (torch.Tensor, FakeTensor)

LEAST_BYTES = 1024
"""Smallest size of a tensor that is moved. A smaller copy costs more than it frees."""


class SavedGroup(Protocol):
    """Tensors that one call of a block put into a store."""

    def put(self, flat: torch.Tensor) -> Any:
        """Store a one-dimensional tensor, and return a handle for `get`."""

    def get(self, handle: Any) -> torch.Tensor:
        """Return a tensor with the same values on the device. May be called more than once."""


class ActivationStore(Protocol):
    """Store for saved tensors."""

    def begin(self) -> None:
        """Begin another forward. Call it if the backward of the last forward may not have begun."""

    def open(self, index: int) -> SavedGroup:
        """Open a group for block `index`. Groups are opened in the order of the blocks."""

    def prefetcher(self) -> Callable[[], None]:
        """Return a function that starts the prefetch of the group that was opened last."""

    def drain(self) -> None:
        """Wait until all stored tensors have left the device's memory."""

    def close(self) -> None:
        """End threads and free unused memory. Nothing is stored afterwards."""


class OffloadedActivations(StepHook):
    """Note of `Parts` and hook for the blocks whose saved tensors are moved to a store.

    Args:
        store: The store.
        blocks: Number of blocks of the rank, from the first one on, that use the store.
    """

    def __init__(self, store: ActivationStore, blocks: int) -> None:
        self.store = store
        self.blocks = blocks

    def on_error(self, lost: FailureScope) -> None:
        """Forget the groups of the step that failed."""
        self.store.begin()

    def close(self) -> None:
        """Close the store."""
        self.store.close()


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


@dataclass(frozen=True)
class _PartitionedTensor:
    """Part of this rank of a tensor that is the same on every rank of the partition's group."""

    part: torch.Tensor | _StoredView
    shape: torch.Size


class SavedTensors:
    """Moves the saved tensors of one block. See Note [Tensors that are moved].

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
        """True if any tensor is moved."""
        return self._store is not None or self._partition is not None

    def hooks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return the saved-tensor hooks for one call of the block.

        Args:
            args: Positional arguments of the call. The first one (or `hidden_states`) is kept alive
                by the block only; other tensors are shared between blocks.
            kwargs: Keyword arguments of the call.
        """
        hidden = args[0] if args else kwargs.get("hidden_states")
        input_storage = memory_key(hidden) if isinstance(hidden, torch.Tensor) else None
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        shared = {memory_key(tensor) for tensor in tensors} - {input_storage}
        for tensor in (*self._block.parameters(), *self._block.buffers()):
            shared.add(memory_key(local_tensor(tensor)))
        nested_units = [
            module
            for module in self._block.modules()
            if isinstance(module, FSDPModule) and module is not self._block
        ]
        stored_call = None
        if self._store is not None:
            stored_call = _StoredCall(self._store.open(self._index))

        def pack(tensor: torch.Tensor) -> Any:
            if not _is_movable(tensor, shared) or _is_parameter_of(tensor, nested_units):
                return tensor
            is_input = memory_key(tensor) == input_storage
            if self._partition is not None and is_input and tensor.is_contiguous():
                start, size = shard_range(tensor.numel(), self._partition)
                part = tensor.detach().reshape(-1).narrow(0, start, size).clone()
                if stored_call is None:
                    return _PartitionedTensor(part, tensor.shape)
                return _PartitionedTensor(stored_call.put(part), tensor.shape)
            if stored_call is None:
                return tensor
            return stored_call.put(tensor)

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


class _StoredCall:
    """Puts saved tensors of one call of a block into its group, each storage once."""

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


def _is_movable(tensor: torch.Tensor, shared: set[int]) -> bool:
    """Return True if offloading a tensor frees memory.

    Args:
        tensor: The saved tensor.
        shared: Storages that something else keeps in memory.
    """
    if type(tensor) not in _MOVED_TYPES or memory_key(tensor) in shared:
        return False
    return tensor.untyped_storage().nbytes() >= LEAST_BYTES


def _is_parameter_of(tensor: torch.Tensor, units: Sequence[nn.Module]) -> bool:
    """Return True if the tensor is a parameter of one of the units, or a gathered one."""
    # Units gather their parameters after the forward of the block has begun, so their storages are
    # not known before.
    for unit in units:
        for attribute in (*own_parameters(unit).values(), *vars(unit).values()):
            if not isinstance(attribute, torch.Tensor):
                continue
            if memory_key(tensor) == memory_key(local_tensor(attribute)):
                return True
    return False


def _from_store(packed: _StoredView) -> torch.Tensor:
    stored = packed.storage
    flat = None
    if stored.last is not None:
        flat = stored.last()
    if flat is None:
        flat = stored.group.get(stored.handle)
        stored.last = weakref.ref(flat)
    # A storage may have a few bytes more than a multiple of the element size.
    usable_bytes = flat.numel() // packed.dtype.itemsize * packed.dtype.itemsize
    return (
        flat[:usable_bytes].view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)
    )
