"""Translation of pydantic's errors into the rule that a value violates and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import ErrorDetails

from plait.names import similar_names, suggest_names

_INTEGER = ("a whole number", "write a whole number")
_NUMBER = ("a number", "write a number")
_BOOLEAN = ("true or false", "write true or false")
_LIST = ("a list", "write a list in brackets")
_OBJECT = ("an object", "write {...}")
_RULES = {
    "int_parsing": _INTEGER,
    "int_parsing_size": _INTEGER,
    "int_type": _INTEGER,
    "int_from_float": _INTEGER,
    "float_parsing": _NUMBER,
    "float_type": _NUMBER,
    "finite_number": _NUMBER,
    # Error of `numbers._refuse_bool`.
    "number": ("a number, not true or false", "write a number"),
    "bool_parsing": _BOOLEAN,
    "bool_type": _BOOLEAN,
    "string_type": ("text", "write text in quotes"),
    "string_too_short": ("some text", "write a text"),
    "tuple_type": _LIST,
    "list_type": _LIST,
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    # An item of a tuple. A missing key is reported elsewhere.
    "missing": ("longer by at least one value", "add what is missing"),
    "union_tag_invalid": ("one of what is known", "correct it"),
}
"""Pairs (rule, remedy) of errors without numbers, by pydantic's type of the error."""


def describe_error(error: ErrorDetails) -> tuple[str, str]:
    """Return (rule, remedy) for an error of pydantic.

    Args:
        error: An item of `ValidationError.errors()`.

    Returns:
        What the value must be, as the end of a sentence that starts with "must be", and what to do
        about it.
    """
    if error["type"] in _RULES:
        return _RULES[error["type"]]

    context: Mapping[str, Any] = error.get("ctx", {})
    match error["type"]:
        case "greater_than_equal":
            return f"at least {context['ge']}", f"use {context['ge']} or more"
        case "greater_than":
            return f"greater than {context['gt']}", f"use more than {context['gt']}"
        case "less_than_equal":
            return f"at most {context['le']}", f"use {context['le']} or less"
        case "less_than":
            return f"less than {context['lt']}", f"use less than {context['lt']}"
        case "too_short":
            return f"at least {context['min_length']} long", "add to it"
        case "too_long":
            return f"at most {context['max_length']} long", "shorten it"
        case "literal_error":
            expected = str(context["expected"])
            return expected, _literal_remedy(error["input"], expected)
        case "place":
            # Errors of paths in `numbers` are written as `rule; remedy`.
            rule, _, remedy = error["msg"].rpartition("; ")
            return rule, remedy
        case _:
            return error["msg"][:1].lower() + error["msg"][1:], "correct it"


def _literal_remedy(value: object, expected: str) -> str:
    # pydantic formats the alternatives as "'a', 'b' or 'c'".
    names = [name.strip(" '") for name in expected.replace(" or ", ",").split(",")]
    if isinstance(value, str) and similar_names(value, names):
        return suggest_names(value, names)
    if len(names) == 1:
        return f"write {expected}, or leave it out"
    return "use one of them"
