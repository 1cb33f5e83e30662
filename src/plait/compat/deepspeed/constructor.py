"""What a model's constructor writes into parameters while it is built on `meta`, where nothing can
be written.

Weights of such a model are drawn later by its classes (`parallel.materialise`). What only a
constructor does would be lost without a sign: a GPT whose constructor scales its output layers,
say. It is noted here, and refused when the model is given to `initialize`.
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

_AGAIN = ("reset_parameters", "_reset_parameters", "_init_weights")
"""Methods that run again when weights are drawn."""
_NO_WRITES = ("requires_grad_", "detach_", "rename_", "share_memory_")
_WRITES_TOO = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")

_WRITES: dict[int, tuple[torch.Tensor, str]] = {}
"""By storage, which the tensor keeps: who has written last."""


class NotedWrites(TorchFunctionMode):
    """Notes writes to tensors on `meta` that are not repeated when weights are drawn."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", ""))
        result = func(*args, **kwargs)
        in_place = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES
        if in_place or name in _WRITES_TOO or func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            target = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
            where = (
                _writer(sys._getframe(1))
                if isinstance(target, torch.Tensor) and target.is_meta
                else None
            )
            if where is not None and isinstance(target, torch.Tensor):
                _WRITES[storage_key(target)] = (
                    target,
                    f"{'data' if name == '__set__' else name} in {where}",
                )
        return result


def _writer(frame: FrameType | None) -> str | None:
    """The function outside of torch that writes; None where it runs again."""
    found: str | None = None
    while frame is not None:
        code = frame.f_code
        if code.co_name in _AGAIN:
            return None
        if found is None and str(frame.f_globals.get("__name__")).partition(".")[0] not in (
            "torch",
            "plait",
        ):
            found = f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})"
        frame = frame.f_back
    return found


def refuse_lost_writes(model: nn.Module) -> None:
    """Raise InputError where a parameter on `meta` was written to by code that does not run
    again.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            continue
        written = _WRITES.pop(storage_key(parameter), None)
        if written is not None:
            raise InputError(
                f"{name} is set by {written[1]}, and a model built under zero.Init() has no memory"
                " to write to: its weights are drawn in initialize by its classes'"
                " reset_parameters, or by the model's _init_weights(self, module); set it in one"
                " of those, or build the model without zero.Init() (enabled=False)"
            )
