"""Observers of `zero_grad` calls, for which torch has no hooks.

Patched behaviour: `zero_grad` of `torch.optim.Optimizer`, of `torch.nn.Module` and of their
subclasses notifies observers for the rest of the process. A subclass of `Optimizer` is patched when
an optimizer of this class is constructed. A subclass of `Module` is patched when a model that
contains a module of this class is observed.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer

_OBSERVERS: weakref.WeakKeyDictionary[Any, Callable[..., None]] = weakref.WeakKeyDictionary()
"""Functions of the observing methods, keyed by the objects to which the methods are bound."""

_OBSERVED: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""Replacements of `zero_grad`, which notify the observers."""

_NOTIFIED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers and modules whose latest `zero_grad` the observers have been notified of."""


def observe_zero_grad(observer: Callable[..., None], model: nn.Module) -> None:
    """Call `observer(owner, set_to_none=)` after every `zero_grad` of an optimizer or module.

    Args:
        observer: A bound method. It is called as long as its object exists.
        model: Model whose modules may override `zero_grad`.
    """
    assert isinstance(observer, MethodType)
    _OBSERVERS[observer.__self__] = observer.__func__
    _patch()
    for module in model.modules():
        _observe_class(type(module))


@functools.cache
def _patch() -> None:
    _observe_class(Optimizer)
    _observe_class(nn.Module)
    optimizer_class: Any = Optimizer
    construct = optimizer_class.__init__

    @functools.wraps(construct)
    def construct_observed(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        construct(optimizer, *args, **kwargs)
        _observe_class(type(optimizer))

    optimizer_class.__init__ = construct_observed


def _observe_class(owner_class: Any) -> None:
    zero_grad = owner_class.zero_grad
    if zero_grad in _OBSERVED:
        return
    signature = inspect.signature(zero_grad)

    @functools.wraps(zero_grad)
    def zero_and_notify(owner: Any, *args: Any, **kwargs: Any) -> Any:
        _NOTIFIED.discard(owner)
        result = zero_grad(owner, *args, **kwargs)
        # A subclass may call the method of its base class, which knows the right `set_to_none`.
        if owner not in _NOTIFIED:
            arguments = signature.bind(owner, *args, **kwargs)
            arguments.apply_defaults()
            set_to_none = arguments.arguments.get("set_to_none", True)
            for instance, function in list(_OBSERVERS.items()):
                function(instance, owner, set_to_none=set_to_none)
            _NOTIFIED.add(owner)
        return result

    _OBSERVED.add(zero_and_notify)
    owner_class.zero_grad = zero_and_notify
