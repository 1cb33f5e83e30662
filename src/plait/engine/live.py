"""Which storages are alive, how large, and who made them: a dispatch mode for real and for fake tensors alike.

A storage belongs to the unit (a block, or an end of the model) during whose forward it appeared, unless it is claimed for another. Not a
profiler: it sees what goes through torch's dispatcher, not what kernels take inside.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from plait._torch import TorchDispatchMode, local_tensor, tree_leaves


class LiveStorages(TorchDispatchMode):
    """`with LiveStorages(known=...) as live:` counts storages that appear inside. `known` (parameters, the batch) are never counted."""

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
        self.forget(known)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these, from now on."""
        for tensor in tensors:
            storage = local_tensor(tensor.detach()).untyped_storage()
            self._gone(storage._cdata)
            self._known[storage._cdata] = storage

    def claim(self, tensor: torch.Tensor, unit: int) -> None:
        """A storage that is counted belongs to `unit` instead."""
        key = tensor.untyped_storage()._cdata
        if key in self._units:
            size, before = self._units[key]
            self.bytes[before] -= size
            self.bytes[unit] += size
            self._units[key] = (size, unit)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = self.call(func, args, kwargs or {})
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":  # DTensor asks for shapes on meta
                self._appeared(leaf.untyped_storage())
        return out

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operator."""
        return func(*args, **kwargs)

    def _appeared(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or key in self._units:
            return
        size = storage.nbytes()
        self._units[key] = (size, self.unit)
        self._references[key] = weakref.ref(storage, partial(_call, weakref.WeakMethod(self._gone), key))
        self.bytes[self.unit] += size
        self.total += size
        self.peak = max(self.peak, self.total)

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
