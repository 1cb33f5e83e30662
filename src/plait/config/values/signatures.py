"""The parameters of a torch class, read from its signature: names, which are required, and a check
and conversion for each value.

So a new parameter of a new torch is known here without a change. Annotations that cannot be read
mean that any value passes.
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

from plait.config.values.rules import tell


@dataclass(frozen=True)
class Parameter:
    """One parameter of a class."""

    required: bool
    values: TypeAdapter[Any]


@cache
def parameters(found: Callable[..., object]) -> Mapping[str, Parameter]:
    """Parameter name of a class to what is known about it."""
    hints = _hints(found)
    config = ConfigDict(arbitrary_types_allowed=True)
    return MappingProxyType(
        {
            name: Parameter(
                parameter.default is parameter.empty,
                TypeAdapter(hints.get(name, Any), config=config),
            )
            for name, parameter in inspect.signature(found).parameters.items()
        }
    )


def _hints(found: Callable[..., object]) -> dict[str, Any]:
    # torch writes these as text and imports them for type checkers only. A list, because pydantic
    # would leave an Iterable unchecked.
    names = {"Iterable": list, "Sequence": list, "Callable": Callable}
    try:
        return typing.get_type_hints(found.__init__, localns=names)
    except (NameError, TypeError):
        return {}


def wrong_value(name: str, value: object, error: ValidationError) -> str:
    """One sentence; a union reports every member that did not fit, of which the first is the plain
    one.
    """
    first = error.errors(include_url=False)[0]
    if first["type"] == "number":  # of `numbers`: a sentence already
        return f"`{name}` is {value!r}: {first['msg']}"
    return f"`{name}` is {value!r}: it must be {tell(first)[0]}"


def value_problems(
    convert: Callable[[str, str, object], object], kind: str, params: Mapping[str, object]
) -> list[str]:
    """What is wrong with the values of the parameters of a `kind`, each `rule; remedy`, by what
    `convert` refuses.
    """
    found = []
    for name, value in params.items():
        try:
            convert(kind, name, value)
        except ValidationError as error:
            found.append(f"{wrong_value(name, value, error)}; correct it")
    return found
