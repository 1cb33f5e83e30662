"""Which storages are alive, how large, and who made them: a dispatch mode for real and for fake
tensors.

A storage belongs to the unit (a block, or an end of the model) during whose forward it appeared,
unless it is claimed for another. Not a profiler: it sees what goes through torch's dispatcher, not
what kernels take inside.
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
    """`with LiveStorages(known=...) as live:` counts storages that appear inside. `known`
    (parameters, the batch) are never counted.
    """

    def __init__(self, *, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.unit: int = -1
        """Whom new storages belong to."""
        self.bytes: Counter[int] = Counter()
        """Unit to bytes alive."""
        self.total = 0
        self.peak = 0
        self._known: dict[int, Any] = {}
        self._units: dict[int, tuple[int, int]] = {}
        self._references: dict[int, Any] = {}
        self._paused = False
        self._open = ExitStack()
        self.forget(known)

    def __enter__(self) -> Self:
        self._open.enter_context(on_resize(self._resized))  # how fully_shard frees what it gathered
        # a DTensor's global shape is propagated without memory
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
        """Do not count these, from now on."""
        for tensor in tensors:
            storage = local_tensor(tensor.detach()).untyped_storage()
            self._gone(storage_id(storage))
            self._known[storage_id(storage)] = storage

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these too, which existed before."""
        for tensor in tensors:
            self._appeared(local_tensor(tensor.detach()).untyped_storage())

    def claim(self, tensor: torch.Tensor, unit: int) -> None:
        """A storage that is counted belongs to `unit` instead."""
        self.claim_storage(storage_id(tensor.untyped_storage()), unit)

    def claim_storage(self, key: int, unit: int) -> None:
        """The same by the storage's address (`_cdata`); nothing if it is gone."""
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
            # a fake tensor tells the device that it stands for
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._appeared(leaf.untyped_storage())
        return out

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operator."""
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
        found = self._units.get(storage_id(storage))
        if found is not None:
            before, unit = found
            self._units[storage_id(storage)] = (storage.nbytes(), unit)
            self._add(unit, storage.nbytes() - before)

    def _gone(self, key: int) -> None:
        found = self._units.pop(key, None)
        self._references.pop(key, None)
        if found is not None:
            size, unit = found
            self.bytes[unit] -= size
            self.total -= size


def _call(method: Callable[[], Callable[[int], None] | None], key: int, _: object) -> None:
    alive = method()
    if alive is not None:
        alive(key)
