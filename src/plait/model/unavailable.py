"""A placeholder for a value that this process does not have: it has a shape and a dtype, and any
other use of it is an error.

None in its place would be worse: torch computes a normalisation without a weight in silence, and a
model's own code takes another branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch

from plait.errors import ModelError

_FACTS = frozenset(
    {
        "shape",
        "dtype",
        "device",
        "ndim",
        "requires_grad",
        "layout",
        "is_floating_point",
        "size",
        "dim",
        "numel",
    }
)


class Unavailable:
    """In the place of a tensor. `why` is the whole message of the error."""

    def __init__(self, why: str, like: torch.Tensor | None = None) -> None:
        self.__dict__["_why"] = why
        self.__dict__["_like"] = (
            None if like is None else torch.empty_like(like, device="meta", requires_grad=False)
        )
        self.__dict__["_device"] = None if like is None else like.device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying, pickling and the like ask for what is not there
            raise AttributeError(name)
        like = self.__dict__["_like"]
        if like is None or name not in _FACTS:
            raise ModelError(self.__dict__["_why"])
        return self.__dict__["_device"] if name == "device" else getattr(like, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unavailable:
        return self

    def __repr__(self) -> str:
        return f"<unavailable: {self.__dict__['_why']}>"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = next(
            (value for value in _flat((args, kwargs or {})) if isinstance(value, Unavailable)), None
        )
        raise ModelError(
            found.__dict__["_why"]
            if found is not None
            else "a value that is not on this pipeline stage is used"
        )


def _refuse(name: str) -> Callable[..., Any]:
    def used(self: Unavailable, *_: Any) -> Any:
        raise ModelError(self.__dict__["_why"])

    used.__name__ = name
    return used


for _name in (
    *(
        "add",
        "radd",
        "sub",
        "rsub",
        "mul",
        "rmul",
        "truediv",
        "rtruediv",
        "floordiv",
        "mod",
        "pow",
        "matmul",
        "rmatmul",
        "neg",
        "abs",
    ),
    *(
        "lt",
        "le",
        "gt",
        "ge",
        "eq",
        "ne",
        "bool",
        "len",
        "iter",
        "getitem",
        "setitem",
        "contains",
        "float",
        "int",
        "index",
    ),
):
    setattr(Unavailable, f"__{_name}__", _refuse(f"__{_name}__"))
Unavailable.__hash__ = object.__hash__  # type: ignore[method-assign]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for entry in value:
            yield from _flat(entry)
    else:
        yield value


def output_fields(output: Any) -> dict[str | int, list[torch.Tensor]]:
    """The tensors in each entry of a model's output: by key, by attribute, or by index."""
    return {
        name: [leaf for leaf in _flat(value) if isinstance(leaf, torch.Tensor)]
        for name, value in _entries(output)
    }


def _entries(output: Any) -> list[tuple[str | int, Any]]:
    if isinstance(output, torch.Tensor):
        return [(0, output)]
    if isinstance(output, Mapping):
        return list(output.items())
    if isinstance(output, tuple | list):
        names = getattr(output, "_fields", None) or range(len(output))
        return list(zip(names, output, strict=True))
    return list(vars(output).items()) if is_dataclass(output) or hasattr(output, "__dict__") else []


def without(output: Any, why: Mapping[str | int, str]) -> Any:
    """`output` with the entries `why` unavailable, in place where it can be changed."""
    if not why:
        return output
    if isinstance(output, torch.Tensor):
        return Unavailable(next(iter(why.values())))
    if isinstance(output, tuple):
        entries = [
            Unavailable(why[name]) if name in why else value for name, value in _entries(output)
        ]
        return type(output)(*entries) if hasattr(output, "_fields") else type(output)(entries)
    for name, reason in why.items():
        if isinstance(output, dict | list):
            output[name] = Unavailable(reason)  # type: ignore[index]
        if isinstance(name, str) and hasattr(output, name):
            object.__setattr__(output, name, Unavailable(reason))
    return output
