"""A tree under the schema's names to a Config, with pydantic's errors told as Problems: the name as
written, the value, rule and remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from plait.config.dialects import keys
from plait.config.resolving.degrees import PLANNED
from plait.config.schema.config import Config
from plait.config.values.rules import describe_error
from plait.errors import ConfigError, Problem


def validate(tree: Mapping[str, Any], *, written: Mapping[str, str]) -> Config:
    """The Config of `tree`. `written` gives the name in the file of a schema path. Raises
    ConfigError with every problem.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(*problems_of(error.errors(include_url=False), written=written)) from None


def problems_of(errors: Sequence[ErrorDetails], *, written: Mapping[str, str]) -> list[Problem]:
    """One problem a field; what the alternatives of one field say is put together."""
    by_field: dict[str, list[ErrorDetails]] = {}
    for error in errors:
        by_field.setdefault(_field(error["loc"]), []).append(error)
    return [
        problem
        for field, found in by_field.items()
        for problem in _problems(written.get(field, field), found)
    ]


def _field(location: tuple[int | str, ...]) -> str:
    """The schema path of an error, without the names of alternatives and the positions in lists
    that pydantic adds.
    """
    best = str(location[0]) if location else "the configuration"
    known = keys.known_paths()
    path = ""
    for part in location:
        path = f"{path}.{part}" if path else str(part)
        if path in known:
            best = path
    return best


def _problems(field: str, errors: list[ErrorDetails]) -> list[Problem]:
    value = errors[0]["input"]
    if errors[0]["type"] == "missing":
        return [Problem(field, None, "has to be given", "add it")]
    if errors[0]["type"] == "value_error":
        text = errors[0]["msg"].removeprefix("Value error, ")
        shown = None if isinstance(value, dict) else value
        return [Problem(field, shown, *_split(part)) for part in text.split(" Also: ")]
    if value == "auto" and field in PLANNED:
        remedy = "run `plait plan FILE --out planned.json` and take planned.json"
        return [
            Problem(
                field,
                value,
                "is answered by a plan, which only `plait train` makes by itself",
                remedy,
            )
        ]
    told = [describe_error(error) for error in errors]
    return [
        Problem(
            field,
            value,
            "must be " + " or ".join(dict.fromkeys(rule for rule, _ in told)),
            told[0][1],
        )
    ]


def _split(text: str) -> tuple[str, str]:
    """`rule; remedy`, the form in which the sections write their own checks."""
    rule, semicolon, remedy = text.rpartition("; ")
    return (rule, remedy) if semicolon else (text, "correct it")
