"""Context manager that keeps a float64 model in float64 by skipping the model's own casts.

Transformers' norms, softmax and routers compute in float32, even if the model's dtype is float64.
This rounding turns a difference of 1e-16 between two layouts into one of 1e-7, which hides real
errors. Only casts inside the forward of the model's classes are skipped, so the casts of an engine
still take effect. Only verification uses this context manager.
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
    """Function mode in which casts of float64 tensors to narrower dtypes return float64."""

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
            converts = func in (torch.Tensor.to, torch.Tensor.type_as) and len(args) > 1
            if converts and isinstance(args[1], torch.Tensor):
                if args[1].dtype in _NARROWER:
                    return args[0].to(args[1].device)
                return func(*args, **kwargs)
            args = tuple([_widen(value) for value in args])
            kwargs = {name: _widen(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value in _NARROWER:
        return torch.float64
    return value


@contextmanager
def keeping_float64(model: nn.Module, *others: type) -> Iterator[None]:
    """Skip casts to narrower dtypes in the forwards of a float64 model.

    The classes of the modules are patched, not the modules, so that copies, wrappers and
    recomputation of the model are covered. Classes of torch are not patched, because they do not
    cast.

    Args:
        model: The model. Nothing is patched if it has no float64 parameters.
        others: Optimizer classes. Casts in their `step` are skipped as well, because some
            optimizers compute in a narrower dtype on purpose (torch's Muon multiplies in bfloat16).
    """
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes and torch.float64 not in dtypes:
        yield
        return
    # A list, because the wrappers read it after the context has ended.
    inside = [True]
    owners = _owners(model) | {(_owner(kind, "step"), "step") for kind in others}
    before = {(owner, name): vars(owner)[name] for owner, name in owners}
    try:
        for (owner, name), function in before.items():
            setattr(owner, name, _staying_wide(function, inside))
        yield
    finally:
        inside.clear()
        for (owner, name), function in before.items():
            setattr(owner, name, function)


def _owners(model: nn.Module) -> set[tuple[type[Any], str]]:
    """Return (class, method name) of the forwards of a model's modules, without torch's classes."""
    owners = set()
    for kind in {type(module) for module in model.modules()}:
        owner = _owner(kind, "forward")
        if owner.__module__.partition(".")[0] == "torch":
            continue
        owners.add((owner, "forward"))
        # `fully_shard` changes the class of a module to a subclass, which torch creates once.
        # Transformers' layers define a forward on this subclass.
        for subclass in _subclasses(owner):
            if "forward" in vars(subclass):
                owners.add((subclass, "forward"))
    return owners


def _subclasses(kind: type) -> Iterator[type[Any]]:
    direct: list[type[Any]] = kind.__subclasses__()
    for subclass in direct:
        yield subclass
        yield from _subclasses(subclass)


def _owner(kind: type, name: str) -> type[Any]:
    return next(base for base in kind.__mro__ if name in vars(base))


def _staying_wide(function: Callable[..., Any], inside: list[bool]) -> Callable[..., Any]:
    # A class that is created inside the context keeps the wrapped function. `inside` is empty
    # after the context, which makes that function behave as the original one.

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        # Another module's forward has entered the mode already.
        if not inside or any(isinstance(mode, _StayWide) for mode in function_modes()):
            return function(*args, **kwargs)
        with _StayWide():
            return function(*args, **kwargs)

    return wrapped


class _Roundings(TorchDispatchMode):
    """Dispatch mode that records operators that convert float64 to a narrower float dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: dict[str, None] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        takes_float64 = _contains_dtype(tree_leaves((args, kwargs)), (torch.float64,))
        if takes_float64 and _contains_dtype(tree_leaves(result), _NARROWER):
            self.operators[f"{func}"] = None
        return result


def _contains_dtype(leaves: list[Any], dtypes: tuple[torch.dtype, ...]) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype in dtypes for leaf in leaves)


def roundings(run: Callable[[], Any]) -> tuple[str, ...]:
    """Call `run`, and return the names of operators that cast a float64 tensor to a narrower dtype.

    The result is empty if all tensors stay in float64.
    """
    with _Roundings() as mode:
        run()
    return tuple(mode.operators)
