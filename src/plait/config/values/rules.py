"""Translation of pydantic's errors into the rule that a value violates and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import ErrorDetails

from plait.config.values.names import instead, nearest


def describe_error(error: ErrorDetails) -> tuple[str, str]:
    """Return (rule, remedy) for an error of pydantic.

    Args:
        error: An item of `ValidationError.errors()`.

    Returns:
        What the value must be, as the end of a sentence that starts with "must be", and what to do
        about it.
    """
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
        case "int_parsing" | "int_parsing_size" | "int_type" | "int_from_float":
            return "a whole number", "write a whole number"
        case "float_parsing" | "float_type" | "finite_number":
            return "a number", "write a number"
        case "number":
            # Error of `numbers._refuse_bool`.
            return "a number, not true or false", "write a number"
        case "bool_parsing" | "bool_type":
            return "true or false", "write true or false"
        case "string_type":
            return "text", "write text in quotes"
        case "tuple_type" | "list_type":
            return "a list", "write a list in brackets"
        case "dict_type" | "model_type" | "model_attributes_type":
            return "an object", "write {...}"
        case "too_short":
            return f"at least {context['min_length']} long", "add to it"
        case "missing":
            return "longer by at least one value", "add what is missing"
        case "too_long":
            return f"at most {context['max_length']} long", "shorten it"
        case "string_too_short":
            return "some text", "write a text"
        case "union_tag_invalid":
            return "one of what is known", "correct it"
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
    if isinstance(value, str) and nearest(value, names) is not None:
        return instead(value, names)
    if len(names) == 1:
        return f"write {expected}, or leave it out"
    return "use one of them"
