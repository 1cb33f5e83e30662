"""Parameters of torch classes, read from their signatures.

A parameter that a new release of torch adds is therefore known without a change of Plait. A
parameter whose annotation cannot be evaluated accepts any value.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from plait.config.values.rules import describe_error


@dataclass(frozen=True)
class Parameter:
    """Parameter of a constructor."""

    required: bool
    values: TypeAdapter[Any]
    """Adapter that checks and converts a value."""


@cache
def parameters(constructor: Callable[..., object]) -> Mapping[str, Parameter]:
    """Return the parameters of a class, by name."""
    hints = _type_hints(constructor)
    config = ConfigDict(arbitrary_types_allowed=True)

    known = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        adapter: TypeAdapter[Any] = TypeAdapter(hints.get(name, Any), config=config)
        known[name] = Parameter(parameter.default is parameter.empty, adapter)
    return MappingProxyType(known)


def _type_hints(constructor: Callable[..., object]) -> dict[str, Any]:
    # torch writes these annotations as text and imports the names for type checkers only. An
    # Iterable is read as a list, because pydantic would not check its items.
    names = {"Iterable": list, "Sequence": list, "Callable": Callable}
    try:
        return typing.get_type_hints(constructor.__init__, localns=names)
    except (NameError, TypeError):
        return {}


def invalid_value_message(name: str, value: object, error: ValidationError) -> str:
    """Return a sentence about a value that pydantic refused."""
    # For a union pydantic reports every member that did not match. The first is the plain type.
    first = error.errors(include_url=False)[0]
    if first["type"] == "number":
        # Error of `numbers._refuse_bool`, which is a sentence already.
        return f"`{name}` is {value!r}: {first['msg']}"
    return f"`{name}` is {value!r}: it must be {describe_error(first)[0]}"


def value_problems(
    convert: Callable[[str, str, object], object], kind: str, params: Mapping[str, object]
) -> list[str]:
    """Return the problems of parameter values, each as `rule; remedy`.

    Args:
        convert: Converts (kind, name, value), and raises ValidationError for an invalid value.
        kind: Type of the optimizer or schedule.
        params: Values by parameter name.
    """
    problems = []
    for name, value in params.items():
        try:
            convert(kind, name, value)
        except ValidationError as error:
            problems.append(f"{invalid_value_message(name, value, error)}; correct it")
    return problems
