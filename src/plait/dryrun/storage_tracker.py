"""Track which storages are alive, their sizes, and the part of the model that created them.

A dispatch mode for real and fake tensors. A storage belongs to the unit (a block, or an end of the
model) during whose forward it appeared, unless it is claimed for another. Only storages that pass
torch's dispatcher are visible; temporary memory inside of kernels is not.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor

from plait._torch.dtensor import around_shape_inference, local_tensor
from plait._torch.operators import TorchDispatchMode, tree_leaves
from plait._torch.storage import on_resize, storage_id


class LiveStorages(TorchDispatchMode):
    """Counts the storages that appear within its context.

    Args:
        known: Tensors that are never counted, such as parameters and the batch.
    """

    def __init__(self, *, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.unit: int = -1
        """Unit of new storages."""
        self.bytes: Counter[int] = Counter()
        """Live bytes by unit."""
        self.total = 0
        self.peak = 0
        self._known: dict[int, Any] = {}
        self._units: dict[int, tuple[int, int]] = {}
        self._references: dict[int, Any] = {}
        self._paused = False
        self._open = ExitStack()
        self.forget(known)

    def __enter__(self) -> Self:
        # fully_shard frees gathered parameters by resizing their storages.
        self._open.enter_context(on_resize(self._resized))
        # DTensor infers shapes with tensors that have no memory.
        self._open.enter_context(around_shape_inference(self._pause))
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self._open.close()

    @contextmanager
    def _pause(self) -> Iterator[None]:
        before = self._paused
        self._paused = True
        try:
            yield
        finally:
            self._paused = before

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Stop counting tensors."""
        for tensor in tensors:
            storage = local_tensor(tensor.detach()).untyped_storage()
            self._gone(storage_id(storage))
            self._known[storage_id(storage)] = storage

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that existed before the tracker was active."""
        for tensor in tensors:
            self._appeared(local_tensor(tensor.detach()).untyped_storage())

    def claim(self, tensor: torch.Tensor, unit: int) -> None:
        """Assign a counted storage to another unit."""
        self.claim_storage(storage_id(tensor.untyped_storage()), unit)

    def claim_storage(self, key: int, unit: int) -> None:
        """Assign a storage by its address (`_cdata`) to another unit, if it is alive."""
        if key in self._units:
            size, before = self._units[key]
            self.bytes[before] -= size
            self.bytes[unit] += size
            self._units[key] = (size, unit)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self._paused:
            return func(*args, **(kwargs or {}))
        out = self.call(func, args, kwargs or {})

        for leaf in tree_leaves(out):
            # Fake tensors report the device that they stand for; only meta tensors have no memory.
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._appeared(leaf.untyped_storage())
        return out

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator. Subclasses override it."""
        return func(*args, **kwargs)

    def _appeared(self, storage: torch.UntypedStorage) -> None:
        key = storage_id(storage)
        if key in self._known or key in self._units:
            return
        size = storage.nbytes()
        self._units[key] = (size, self.unit)
        self._references[key] = weakref.ref(
            storage, partial(_call, weakref.WeakMethod(self._gone), key)
        )
        self._add(self.unit, size)

    def _add(self, unit: int, size: int) -> None:
        self.bytes[unit] += size
        self.total += size
        self.peak = max(self.peak, self.total)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        entry = self._units.get(storage_id(storage))
        if entry is not None:
            before, unit = entry
            self._units[storage_id(storage)] = (storage.nbytes(), unit)
            self._add(unit, storage.nbytes() - before)

    def _gone(self, key: int) -> None:
        entry = self._units.pop(key, None)
        self._references.pop(key, None)
        if entry is not None:
            size, unit = entry
            self.bytes[unit] -= size
            self.total -= size


def _call(method: Callable[[], Callable[[int], None] | None], key: int, _: object) -> None:
    bound = method()
    if bound is not None:
        bound(key)
