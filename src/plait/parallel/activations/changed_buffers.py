"""Buffers that a recomputed block changes in its forward, such as running means.

The recomputation begins with the values with which the forward began, and leaves the values that
the forward left. Otherwise a mean would move twice, and gradients would be those of another loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from plait._torch.modules import own_buffers
from plait._torch.storage import version_of
from plait.errors import InputError

BufferKey = tuple[nn.Module, str]
"""Module and name of one of its buffers."""

Values = dict[BufferKey, torch.Tensor]
"""Copies of buffers."""

# torch's batch_norm writes these without increasing their version.
_UNVERSIONED = ("running_mean", "running_var")


class ChangedBuffers:
    """Saves and restores the buffers of one block that its forward changes.

    Call `before` and `note` around every forward with gradients, and recompute inside `as_before`.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._keys = [(module, name) for module in block.modules() for name in own_buffers(module)]
        # Buffers that changed in any forward so far, by mode (training or evaluation). Without an
        # entry the next forward saves all buffers, to see which of them change.
        self._changing: dict[bool, set[BufferKey]] = {}
        # Tensors and their versions at the last `before`.
        self._seen: dict[BufferKey, tuple[torch.Tensor | None, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def before(self) -> Values:
        """Return copies of the buffers that a forward is about to change."""
        values: Values = {}
        changing = self._changing.get(self._block.training)
        for key in self._keys:
            module, name = key
            tensor = own_buffers(module).get(name)
            if tensor is None:
                self._seen[key] = (None, 0)
                continue
            self._seen[key] = (tensor, version_of(tensor))
            if changing is None or key in changing or self._is_unversioned(key):
                values[key] = tensor.detach().clone()
        return values

    def note(self, values: Values) -> None:
        """Remember which buffers a forward changed, and drop the copies of the others.

        Args:
            values: Result of `before` for this forward. Copies of unchanged buffers are removed.

        Raises:
            InputError: A buffer changed for the first time after the first forward.
        """
        changed = {key for key in self._keys if self._is_unversioned(key) or self._has_changed(key)}
        for key in changed:
            module, name = key
            if key not in values and self._seen[key][0] is not None:
                raise InputError(
                    f"the buffer {name} of a {type(module).__name__} in a recomputed block began to"
                    " change after the first forward, and recomputing would change it twice; use"
                    " parallel.recompute.mode = none"
                )
        changed |= self._changing.get(self._block.training, set())
        self._changing[self._block.training] = changed
        for key in set(values) - changed:
            del values[key]

    @contextmanager
    def as_before(self, values: Values) -> Iterator[None]:
        """Return a context in which the block has copies of `values` as its buffers."""
        current = {key: own_buffers(key[0]).get(key[1]) for key in values}
        for (module, name), value in values.items():
            own_buffers(module)[name] = value.clone()
        try:
            yield
        finally:
            for (module, name), tensor in current.items():
                own_buffers(module)[name] = tensor

    def _has_changed(self, key: BufferKey) -> bool:
        tensor, version = self._seen[key]
        current = own_buffers(key[0]).get(key[1])
        return current is not tensor or (current is not None and version_of(current) != version)

    @staticmethod
    def _is_unversioned(key: BufferKey) -> bool:
        module, name = key
        return name in _UNVERSIONED and module.training
