"""Detection of values that a model's constructor writes while the model is built on `meta`.

A tensor on `meta` has no memory, so such a write has no effect. Weights of the model are drawn
later by the classes of its modules (`parallel.materialise`). A value that only the constructor sets
would be lost silently, for example the scaled output layers of a GPT. Writes are recorded while the
model is built, and `initialize` refuses the model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from plait._torch.storage import storage_key
from plait.errors import InputError

_INITIALISERS = ("reset_parameters", "_reset_parameters", "_init_weights")
"""Methods that are called again when the weights are drawn."""
_NOT_WRITING = ("requires_grad_", "detach_", "rename_", "share_memory_")
"""Methods that end in an underscore and do not change values."""
_WRITING_OPERATORS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")

_WRITES: dict[int, tuple[torch.Tensor, str]] = {}
"""Last write by storage: the tensor and a description. The tensor keeps the storage's address."""


class RecordedWrites(TorchFunctionMode):
    """Mode that records writes to tensors on `meta` that are not repeated with their weights."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)

        name = str(getattr(func, "__name__", ""))
        sets_data = func == torch.Tensor.data.__set__  # type: ignore[attr-defined]
        if not (_writes_in_place(name) or sets_data):
            return result
        # nn.init's functions name their argument `tensor`, torch's functions name it `input`.
        target = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        if not isinstance(target, torch.Tensor) or not target.is_meta:
            return result
        writer = _find_writer(sys._getframe(1))
        if writer is not None:
            operation = "data" if name == "__set__" else name
            _WRITES[storage_key(target)] = (target, f"{operation} in {writer}")
        return result


def _writes_in_place(name: str) -> bool:
    """Return True if the function of a name writes to its first argument."""
    if name in _WRITING_OPERATORS:
        return True
    return name.endswith("_") and not name.endswith("__") and name not in _NOT_WRITING


def _find_writer(frame: FrameType | None) -> str | None:
    """Return the innermost function outside of torch and Plait, with its place.

    Returns:
        None if the write is part of an initialiser, which is called again.
    """
    writer: str | None = None
    # All callers are searched, because an initialiser may write in a helper function.
    while frame is not None:
        code = frame.f_code
        if code.co_name in _INITIALISERS:
            return None
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if writer is None and package not in ("torch", "plait"):
            writer = f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})"
        frame = frame.f_back
    return writer


def refuse_lost_writes(model: nn.Module) -> None:
    """Refuse a model on `meta` whose constructor wrote to a parameter.

    Raises:
        InputError: The write would not be repeated when the weights are drawn.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            continue
        write = _WRITES.pop(storage_key(parameter), None)
        if write is not None:
            _, description = write
            raise InputError(
                f"{name} is set by {description}, and a model built under zero.Init() has no memory"
                " to write to: its weights are drawn in initialize by its classes'"
                " reset_parameters, or by the model's _init_weights(self, module); set it in one"
                " of those, or build the model without zero.Init() (enabled=False)"
            )
