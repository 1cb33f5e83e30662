"""Placeholder for a value that does not exist on this process.

It has a shape and a dtype, and any other use of it raises an error. None in its place would hide
mistakes: torch silently computes a normalisation without a weight, and a model's own code takes
another branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch

from plait.errors import ModelError

_AVAILABLE_ATTRIBUTES = frozenset(
    {"shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_floating_point", "size"}
    | {"dim", "numel"}
)


class UnavailableTensor:
    """Placeholder for a tensor.

    Args:
        why: Complete message of the error that any use raises.
        like: Tensor with the shape, dtype and device of the missing one.
    """

    def __init__(self, why: str, like: torch.Tensor | None = None) -> None:
        # The entries are set in `__dict__`, because `__getattr__` raises an error for missing ones.
        self.__dict__["_why"] = why
        self.__dict__["_like"] = None
        self.__dict__["_device"] = None
        if like is not None:
            # The placeholder takes no memory.
            self.__dict__["_like"] = torch.empty_like(like, device="meta", requires_grad=False)
            self.__dict__["_device"] = like.device

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling look for optional methods.
        if name.startswith("__"):
            raise AttributeError(name)
        like = self.__dict__["_like"]
        if like is None or name not in _AVAILABLE_ATTRIBUTES:
            raise ModelError(self.__dict__["_why"])
        return self.__dict__["_device"] if name == "device" else getattr(like, name)

    # A placeholder has no state that a copy could change.
    def __deepcopy__(self, memo: dict[int, Any]) -> UnavailableTensor:
        return self

    def __repr__(self) -> str:
        return f"<unavailable: {self.__dict__['_why']}>"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for value in _leaves((args, kwargs or {})):
            if isinstance(value, UnavailableTensor):
                raise ModelError(value.__dict__["_why"])
        raise ModelError("a value that is not on this pipeline stage is used")


_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod"),
    *("pow", "matmul", "rmatmul", "neg", "abs", "lt", "le", "gt", "ge", "eq", "ne", "bool", "len"),
    *("iter", "getitem", "setitem", "contains", "float", "int", "index"),
)


def _raising_method(name: str) -> Callable[..., Any]:
    def method(self: UnavailableTensor, *_: Any) -> Any:
        raise ModelError(self.__dict__["_why"])

    method.__name__ = name
    return method


# Python looks up operators on the class, so `__getattr__` does not see them.
for _name in _OPERATORS:
    setattr(UnavailableTensor, f"__{_name}__", _raising_method(f"__{_name}__"))
# Setting __eq__ keeps the hash of `object`; a set of values may contain a placeholder.
UnavailableTensor.__hash__ = object.__hash__  # type: ignore[method-assign]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for entry in value:
            yield from _leaves(entry)
    else:
        yield value


def output_fields(output: Any) -> dict[str | int, list[torch.Tensor]]:
    """Return the tensors in each entry of a model's output.

    Args:
        output: A tensor, mapping, tuple, list, or object with attributes.

    Returns:
        Lists of tensors by key, attribute or index.
    """
    fields = {}
    for name, value in _entries(output):
        fields[name] = [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]
    return fields


def _entries(output: Any) -> list[tuple[str | int, Any]]:
    if isinstance(output, torch.Tensor):
        return [(0, output)]
    if isinstance(output, Mapping):
        return list(output.items())
    if isinstance(output, tuple | list):
        names = getattr(output, "_fields", None) or range(len(output))
        return list(zip(names, output, strict=True))
    if is_dataclass(output) or hasattr(output, "__dict__"):
        return list(vars(output).items())
    return []


def with_unavailable_entries(output: Any, why: Mapping[str | int, str]) -> Any:
    """Replace entries of a model's output by placeholders.

    Args:
        output: See `output_fields`. It is changed in place if its type permits.
        why: Complete message of the error, by key, attribute or index of the entry.

    Returns:
        The changed output.
    """
    if not why:
        return output
    if isinstance(output, torch.Tensor):
        return UnavailableTensor(next(iter(why.values())))
    if isinstance(output, tuple):
        entries = [
            UnavailableTensor(why[name]) if name in why else value
            for name, value in _entries(output)
        ]
        # The constructor of a named tuple takes one argument per entry.
        return type(output)(*entries) if hasattr(output, "_fields") else type(output)(entries)

    for name, reason in why.items():
        if isinstance(output, dict | list):
            output[name] = UnavailableTensor(reason)  # type: ignore[index]
        # Transformers' outputs have every entry under its key and as an attribute.
        if isinstance(name, str) and hasattr(output, name):
            object.__setattr__(output, name, UnavailableTensor(reason))
    return output
