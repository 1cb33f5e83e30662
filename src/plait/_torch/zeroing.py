"""Calls of `zero_grad`, for which torch has no hooks.

Patched behaviour: `zero_grad` of `torch.optim.Optimizer` and `torch.nn.Module` notifies observers
for the rest of the process. An optimizer with a `zero_grad` of its own that does not call torch's
is not observed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer

_OBSERVERS: weakref.WeakKeyDictionary[Any, Callable[..., None]] = weakref.WeakKeyDictionary()
"""Functions of the observing methods, keyed by the objects that the methods are bound to."""


def observe_zero_grad(observer: Callable[..., None]) -> None:
    """Call `observer(owner, set_to_none=)` after every `zero_grad` of an optimizer or module.

    Args:
        observer: A bound method. It is called for as long as its object lives.
    """
    assert isinstance(observer, MethodType)
    _OBSERVERS[observer.__self__] = observer.__func__
    _patch()


@functools.cache
def _patch() -> None:
    Optimizer.zero_grad = _observed(Optimizer.zero_grad)  # type: ignore[method-assign]
    nn.Module.zero_grad = _observed(nn.Module.zero_grad)  # type: ignore[method-assign]


def _observed(zero_grad: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(zero_grad)
    def zero_and_tell(owner: Any, set_to_none: bool = True) -> None:
        zero_grad(owner, set_to_none)
        for instance, function in list(_OBSERVERS.items()):
            function(instance, owner, set_to_none=set_to_none)

    return zero_and_tell
