"""Layers of a cache that keep a window of tokens, and no more memory than that.

Transformers' own keep the last tokens as a view of all that a forward had, so that after a long
prompt every layer holds the whole of it until the next token.
"""

from __future__ import annotations

from typing import Any

import torch


def without_rests(layer: Any) -> None:
    """Let a layer with a window copy what it keeps, where that is a part of something larger."""
    if getattr(layer, "is_sliding", False):
        kind = type(layer)
        layer.__class__ = _KINDS.get(kind) or _KINDS.setdefault(kind, _copying(kind))


_KINDS: dict[type, type] = {}
"""Transformers' to Plait's: one for each, as a pipeline's stage looks for layers of one kind."""


def _copying(kind: Any) -> type:
    """The same kind of layer."""

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = kind.update(self, *args, **kwargs)
        is_one = self.values is self.keys
        self.keys = _own(self.keys)
        self.values = self.keys if is_one else _own(self.values)
        return result

    return type(kind.__name__, (kind,), {"update": update, "__module__": kind.__module__})


def _own(kept: torch.Tensor) -> torch.Tensor:
    return (
        kept.clone(memory_format=torch.contiguous_format)
        if kept.untyped_storage().nbytes() > kept.nbytes
        else kept
    )
