"""State of a recomputed block that its forward changes: buffers and attributes.

Note [State of recomputed blocks]
    A block may change buffers or attributes in its forward, such as a running mean or a counter.
    The recomputation starts from the values that the forward started from. Afterwards the block has
    the values again that it had just before the recomputation. Otherwise a running mean would be
    updated twice, and gradients would be those of another loss.

    A tensor that changes in place needs a copy of its values. The first forward copies all tensors,
    and later forwards copy only the tensors that an earlier forward changed. Attributes need a
    reference, and lists, sets and dictionaries a shallow copy.
"""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from plait._torch.modules import direct_attributes, direct_buffers, is_of_torch, is_unversioned
from plait._torch.tensors import version_of
from plait.errors import InputError

StateKey = tuple[nn.Module, str]
"""Module and name of one of its buffers or attributes."""
_MISSING = object()
"""Value of an attribute that does not exist."""
_CONTAINERS = (list, set, dict, deque)
"""Types of attributes whose contents a forward may change."""


@dataclass
class BlockSnapshot:
    """State of a block before a forward."""

    values: list[dict[str, Any]]
    """`vars` of each module. Empty after the forward."""
    tensors: dict[StateKey, torch.Tensor] = field(default_factory=dict)
    """Copies of tensors that change in place."""
    attributes: dict[StateKey, Any] = field(default_factory=dict)
    """Copies of containers. After the forward: former values of the attributes that it changed."""


class BlockState:
    """State that the forward of one block changes, which is saved and restored.

    Call `save` and `record_changes` around every forward with gradients, and recompute inside
    `restored`. See Note [State of recomputed blocks].
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._modules = list(block.modules())
        self._buffers = [
            (module, name) for module in self._modules for name in direct_buffers(module)
        ]
        # Tensors that changed in any forward so far, by mode (training or evaluation). Without an
        # entry the next forward copies all tensors, to see which of them change.
        self._changing: dict[bool, set[StateKey]] = {}
        # Tensors and their versions at the last `save`.
        self._versions: dict[StateKey, tuple[torch.Tensor, int]] = {}
        # `vars` of each module when its attributes were last searched for tensors and containers.
        self._searched: list[dict[str, Any]] = []
        self._tensors: dict[StateKey, torch.Tensor] = {}
        self._containers: dict[StateKey, Any] = {}

    def save(self) -> BlockSnapshot:
        """Return the state that the next forward may change."""
        snapshot = BlockSnapshot([vars(module).copy() for module in self._modules])
        # Usually no attribute has changed since the last forward, and comparing is fast.
        if not _are_same(self._searched, snapshot.values):
            self._search(snapshot.values)
        for key, container in self._containers.items():
            snapshot.attributes[key] = copy.copy(container)

        self._versions = {}
        changing = self._changing.get(self._block.training)
        tensors = dict(self._tensors)
        for module, name in self._buffers:
            buffer = direct_buffers(module).get(name)
            if buffer is not None:
                tensors[module, name] = buffer
        for key, tensor in tensors.items():
            self._versions[key] = (tensor, version_of(tensor))
            if changing is None or key in changing or is_unversioned(*key):
                snapshot.tensors[key] = tensor.detach().clone()
        return snapshot

    def record_changes(self, snapshot: BlockSnapshot) -> None:
        """Record which state a forward changed, and drop the rest of the snapshot.

        Args:
            snapshot: Result of `save` for this forward.

        Raises:
            InputError: This forward changed a tensor that the first forward did not change.
        """
        changed = {key for key in self._versions if self._has_changed(key)}
        for module, name in changed:
            if (module, name) not in snapshot.tensors:
                raise InputError(
                    f"{name} of a {type(module).__name__} in a recomputed block began to change"
                    " after the first forward, and recomputing would change it twice; use"
                    ' parallel.recompute.mode = "none"'
                )
        self._versions = {}
        changed |= self._changing.get(self._block.training, set())
        self._changing[self._block.training] = changed
        for key in set(snapshot.tensors) - changed:
            del snapshot.tensors[key]

        for (module, name), before in list(snapshot.attributes.items()):
            if _have_same_items(before, vars(module).get(name)):
                del snapshot.attributes[module, name]
        for module, values in zip(self._modules, snapshot.values, strict=True):
            for name in _changed_names(values, vars(module)):
                # A container that was replaced may have been changed before.
                snapshot.attributes.setdefault((module, name), values.get(name, _MISSING))
                self._searched = []
        snapshot.values = []

    def _search(self, values: list[dict[str, Any]]) -> None:
        """Find the attributes that can change without being assigned."""
        self._searched = values
        self._tensors = {}
        self._containers = {}
        for module in self._modules:
            for name, value in direct_attributes(module).items():
                if isinstance(value, _CONTAINERS):
                    self._containers[module, name] = value
                # An inference tensor counts no versions, and cannot change in training.
                elif isinstance(value, torch.Tensor) and not value.is_inference():
                    self._tensors[module, name] = value

    def _has_changed(self, key: StateKey) -> bool:
        module, name = key
        tensor, version = self._versions[key]
        if is_unversioned(*key) or version_of(tensor) != version:
            return True
        # The old tensor of an attribute is in the snapshot.
        return name in direct_buffers(module) and direct_buffers(module)[name] is not tensor

    @contextmanager
    def restored(self, snapshot: BlockSnapshot) -> Iterator[None]:
        """Return a context in which the block has the state of a snapshot."""
        attributes = dict(snapshot.attributes)
        buffers: dict[StateKey, torch.Tensor] = {}
        for (module, name), values in snapshot.tensors.items():
            if name in direct_buffers(module):
                buffers[module, name] = values.clone()
            else:
                attributes[module, name] = values.clone()
        current_buffers = {key: direct_buffers(key[0])[key[1]] for key in buffers}
        current = {(module, name): vars(module).get(name, _MISSING) for module, name in attributes}
        for (module, name), buffer in buffers.items():
            direct_buffers(module)[name] = buffer
        for key, value in attributes.items():
            # The recomputation changes the contents again.
            _assign(key, copy.copy(value) if isinstance(value, _CONTAINERS) else value)
        try:
            yield
        finally:
            for (module, name), current_buffer in current_buffers.items():
                direct_buffers(module)[name] = current_buffer
            for key, value in current.items():
                _assign(key, value)


def _are_same(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> bool:
    if len(before) != len(after):
        return False
    return not any(_changed_names(*values) for values in zip(before, after, strict=True))


def _changed_names(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of attributes that were replaced, added or removed."""
    if len(before) == len(after) and all(map(operator.is_, before.values(), after.values())):
        return []
    return [
        name
        for name in {**before, **after}
        if not is_of_torch(name) and before.get(name, _MISSING) is not after.get(name, _MISSING)
    ]


def _have_same_items(before: Any, after: Any) -> bool:
    """Return whether a container still has the items of its earlier copy."""
    if type(before) is not type(after) or len(before) != len(after):
        return False
    if isinstance(before, dict):
        return all(key in after and after[key] is value for key, value in before.items())
    if isinstance(before, set):
        return bool(before == after)
    return all(map(operator.is_, before, after))


def _assign(key: StateKey, value: Any) -> None:
    module, name = key
    if value is _MISSING:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value
