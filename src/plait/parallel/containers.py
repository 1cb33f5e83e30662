"""What a batch may be made of: mappings, tuples, named tuples, lists and dataclasses, nested. They
keep their class when what is in them changes, because a loss may ask for `batch.labels`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch


def entries(value: Any) -> Mapping[Any, Any] | None:
    """What a container holds, by key, position or field; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def rebuilt(value: Any, inside: Mapping[Any, Any]) -> Any:
    """A container like `value`, of the same class, with other entries."""
    if isinstance(value, Mapping):
        if type(value) is dict or not isinstance(value, MutableMapping):
            return dict(inside)
        changed: Any = copy.copy(value)
        for key, entry in inside.items():
            changed[key] = entry
        return changed
    if isinstance(value, tuple):
        return (
            type(value)(*inside.values()) if hasattr(value, "_fields") else tuple(inside.values())
        )
    if isinstance(value, list):
        return list(inside.values())
    changed = copy.copy(value)
    for name, entry in inside.items():
        object.__setattr__(changed, name, entry)
    return changed


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in it, in order."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for entry in (entries(value) or {}).values():
        yield from tensors_in(entry)
