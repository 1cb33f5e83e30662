"""Keeps a float64 model in float64: its classes' own casts to narrower dtypes are left out while
they run forward.

Transformers' norms, softmax and routers compute in float32 whatever the model's dtype. Rounding
there turns a difference of 1e-16 between two layouts into one of 1e-7, under which real errors
hide. Only casts inside the forward of the model's own classes are left out, so casts of an engine
still count. Only verification does this; a run never does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from plait._torch.operators import TorchDispatchMode, function_modes, tree_leaves

_NARROWER = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
_ANGLE_FUNCTIONS = (torch.Tensor.cos, torch.Tensor.sin, torch.cos, torch.sin)


class _StayWide(TorchFunctionMode):
    """Wherever a float64 tensor goes in, no narrower dtype is asked for."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ANGLE_FUNCTIONS and args and args[0].dtype in _NARROWER:
            # Transformers computes the angles of rotary embeddings in float32, and float32 sines of
            # a CPU and of a GPU differ in the last bit.
            return func(args[0].double())
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func in _CASTS:
                return args[0]
            if (
                func in (torch.Tensor.to, torch.Tensor.type_as)
                and len(args) > 1
                and isinstance(args[1], torch.Tensor)
            ):
                return (
                    args[0].to(args[1].device)
                    if args[1].dtype in _NARROWER
                    else func(*args, **kwargs)
                )
            args = tuple([_wide(value) for value in args])
            kwargs = {name: _wide(value) for name, value in kwargs.items()} if kwargs else kwargs
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROWER else value


@contextmanager
def keeping_float64(model: nn.Module, *others: type) -> Iterator[None]:
    """Inside, the classes of `model`'s modules (torch's own excepted, which keep their dtype) run
    forward without narrowing casts.

    The classes are patched, not the objects, so that copies, wrappers and recomputation of the
    model see it too. `others` are optimizer classes, whose `step` is treated the same (torch's Muon
    multiplies in bfloat16).
    """
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes and torch.float64 not in dtypes:
        yield
        return
    inside = [True]
    before = {
        (owner, name): vars(owner)[name]
        for owner, name in _owners(model) | {(_owner(kind, "step"), "step") for kind in others}
    }
    try:
        for (owner, name), function in before.items():
            setattr(owner, name, _staying_wide(function, inside))
        yield
    finally:
        inside.clear()
        for (owner, name), function in before.items():
            setattr(owner, name, function)


def _owners(model: nn.Module) -> set[tuple[type, str]]:
    classes = {type(module) for module in model.modules()}
    owners = {_owner(kind, "forward") for kind in classes}
    own = {owner for owner in owners if owner.__module__.partition(".")[0] != "torch"}
    # A sharded module is of a subclass, which torch makes once; Transformers' layers give it a
    # forward of its own.
    derived = {below for kind in own for below in _below(kind) if "forward" in vars(below)}
    return {(owner, "forward") for owner in own | derived}


def _below(kind: type) -> Iterator[type[Any]]:
    direct: list[type[Any]] = kind.__subclasses__()
    for below in direct:
        yield below
        yield from _below(below)


def _owner(kind: type, name: str) -> type:
    return next(base for base in kind.__mro__ if name in vars(base))


def _staying_wide(function: Callable[..., Any], inside: list[bool]) -> Callable[..., Any]:
    """`inside` is empty where it is over: a class made meanwhile keeps what it found for ever."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        # inside of another module's forward
        if not inside or any(isinstance(mode, _StayWide) for mode in function_modes()):
            return function(*args, **kwargs)
        with _StayWide():
            return function(*args, **kwargs)

    return wrapped


class _Roundings(TorchDispatchMode):
    """Names of operators that made a narrower floating tensor of a float64 one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _has(tree_leaves((args, kwargs)), (torch.float64,)) and _has(
            tree_leaves(result), _NARROWER
        ):
            self.found[f"{func}"] = None
        return result


def _has(leaves: list[Any], dtypes: tuple[torch.dtype, ...]) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype in dtypes for leaf in leaves)


def roundings(run: Callable[[], Any]) -> tuple[str, ...]:
    """The operators in `run` that narrow a float64 tensor, inside `keeping_float64` too. Empty
    where everything stays in float64.
    """
    with _Roundings() as mode:
        run()
    return tuple(mode.found)
