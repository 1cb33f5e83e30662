"""Types of values in configuration files, and the rules that invalid values violate.

A quoted number is a number, because YAML reads `1e-4` as text. Booleans are not numbers, and only
true and false are booleans: pydantic would also accept "yes", "off" and 1, which DeepSpeed reads
differently ("no" is a non-empty string there, and therefore true).

Parameters of torch's classes are read from their signatures, so that parameters of new releases are
known without a change of Plait. A parameter whose annotation cannot be evaluated accepts any value.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from plait.files import is_url
from plait.names import similar_names, suggest_names


def _refuse_bool(value: object) -> object:
    # Python's bool is a subclass of int, so pydantic would accept true as 1.
    if isinstance(value, bool):
        raise PydanticCustomError("number", "true and false are not numbers; write a number")
    return value


MAX_INT = 2**63 - 1
"""Largest integer that torch and the file formats can store."""
MAX_PROCESSES = 2**20
"""Maximum of each degree of parallelism, and of the processes on one machine."""

Flag = Annotated[bool, Field(strict=True)]
"""Boolean that accepts only true and false."""
NotNegative = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, allow_inf_nan=False)]
"""Finite number of at least 0."""
Fraction = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, lt=1)]
"""Number of at least 0 and below 1, such as a momentum."""
Finite = Annotated[float, BeforeValidator(_refuse_bool), Field(allow_inf_nan=False)]
"""Finite number."""
Integer = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=-MAX_INT, le=MAX_INT)]
"""Integer. 1e3 is accepted, 1.5 is not."""
NotNegativeInteger = Annotated[Integer, Field(ge=0)]
"""Integer of at least 0."""
Steps = Annotated[Integer, Field(ge=1)]
"""Number of steps, at least 1."""

MAX_NAME_BYTES = 255
"""Longest file name that Linux allows."""
MAX_PATH_BYTES = 4096
"""Longest path that Linux allows, including the terminating zero byte."""


def _check_path(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not value.strip():
        raise PydanticCustomError(
            "place",
            "a path that is not empty; set a path, or leave the key out",
        )

    # The limits count bytes, of which a letter may have several.
    longest_name = max(len(name.encode()) for name in value.split("/"))
    if len(value.encode()) >= MAX_PATH_BYTES or longest_name > MAX_NAME_BYTES:
        raise PydanticCustomError(
            "place",
            "a path of at most {path} bytes, {part} between two slashes; shorten it",
            {"part": MAX_NAME_BYTES, "path": MAX_PATH_BYTES - 1},
        )
    return value


def _refuse_url(value: str) -> str:
    if is_url(value):
        raise PydanticCustomError(
            "place",
            "must be a folder that this machine sees, not a URL; name a folder (a store's URL"
            " goes into run.checkpoints)",
        )
    return value


PathOrURL = Annotated[str, BeforeValidator(_check_path)]
"""Path of a file or folder, URL of a store, or name on a hub."""
LocalPath = Annotated[PathOrURL, AfterValidator(_refuse_url)]
"""Path in a file system of this machine."""


_INTEGER = ("a whole number", "write a whole number")
_NUMBER = ("a number", "write a number")
_BOOLEAN = ("true or false", "write true or false")
_LIST = ("a list", "write a list in brackets")
_OBJECT = ("an object", "write {{...}}")
_RULES = {
    "int_parsing": _INTEGER,
    "int_parsing_size": _INTEGER,
    "int_type": _INTEGER,
    "int_from_float": _INTEGER,
    "float_parsing": _NUMBER,
    "float_type": _NUMBER,
    "finite_number": _NUMBER,
    # Error of `_refuse_bool`.
    "number": ("a number, not true or false", "write a number"),
    "bool_parsing": _BOOLEAN,
    "bool_type": _BOOLEAN,
    "string_type": ("text", "write text in quotes"),
    "string_too_short": ("a non-empty string", "write a string"),
    "tuple_type": _LIST,
    "list_type": _LIST,
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    # An item of a tuple. A missing key is reported elsewhere.
    "missing": ("longer by at least one value", "add what is missing"),
    "union_tag_invalid": ("one of what is known", "correct it"),
    "greater_than_equal": ("at least {ge}", "use {ge} or more"),
    "greater_than": ("greater than {gt}", "use more than {gt}"),
    "less_than_equal": ("at most {le}", "use {le} or less"),
    "less_than": ("less than {lt}", "use less than {lt}"),
    "too_short": ("at least {min_length} long", "add to it"),
    "too_long": ("at most {max_length} long", "shorten it"),
}
"""Pairs (rule, remedy) by pydantic's type of the error, with the names of its numbers."""


def describe_error(error: ErrorDetails) -> tuple[str, str]:
    """Return (rule, remedy) for a pydantic error.

    Args:
        error: An item of `ValidationError.errors()`.

    Returns:
        rule: What the value must be, as the end of a sentence that starts with "must be".
        remedy: What the user can do.
    """
    context: Mapping[str, Any] = error.get("ctx", {})
    if error["type"] in _RULES:
        rule, remedy = _RULES[error["type"]]
        return rule.format(**context), remedy.format(**context)
    if error["type"] == "literal_error":
        expected = str(context["expected"])
        return expected, _literal_remedy(error["input"], expected)
    if error["type"] == "place":
        # Errors of paths are written as `rule; remedy`.
        rule, _, remedy = error["msg"].rpartition("; ")
        return rule, remedy
    return error["msg"][:1].lower() + error["msg"][1:], "correct it"


def _literal_remedy(value: object, expected: str) -> str:
    # pydantic formats the alternatives as "'a', 'b' or 'c'".
    names = [name.strip(" '") for name in expected.replace(" or ", ",").split(",")]
    if isinstance(value, str) and similar_names(value, names):
        return suggest_names(value, names)
    if len(names) == 1:
        return f"write {expected}, or leave it out"
    return "use one of them"


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
    # Annotations also name classes such as Tensor, which pydantic does not know.
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
        # Error of `_refuse_bool`, which is a sentence already.
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
