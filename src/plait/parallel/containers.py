"""Containers of a batch: mappings, tuples, named tuples, lists and dataclasses, nested.

They keep their class when their entries change, because a loss may access `batch.labels`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def entries(value: Any) -> Mapping[Any, Any] | None:
    """Return the entries of a container by key, position or field, or None for any other value."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def rebuild(value: Any, inside: Mapping[Any, Any]) -> Any:
    """Return a container of the same class with other entries.

    Args:
        value: The container.
        inside: The new entries, with the keys of `entries(value)`.
    """
    if isinstance(value, Mapping):
        if type(value) is dict or not isinstance(value, MutableMapping):
            return dict(inside)
        changed: Any = copy.copy(value)
        for key, entry in inside.items():
            changed[key] = entry
        return changed
    if isinstance(value, tuple):
        # A named tuple.
        if hasattr(value, "_fields"):
            return type(value)(*inside.values())
        return tuple(inside.values())
    if isinstance(value, list):
        return list(inside.values())
    changed = copy.copy(value)
    for name, entry in inside.items():
        # A dataclass may be frozen.
        object.__setattr__(changed, name, entry)
    return changed


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a nested container with `function(tensor)` in place of every tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    inside = entries(value)
    if inside is None:
        return value
    return rebuild(value, {key: map_tensors(function, entry) for key, entry in inside.items()})


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a nested container, in order."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for entry in (entries(value) or {}).values():
        yield from tensors_in(entry)
