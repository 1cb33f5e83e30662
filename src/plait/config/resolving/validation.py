"""Validation of a tree against the schema.

pydantic's errors become Problems, with the name of the file, the value, the rule and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from plait.config.dialects import keys
from plait.config.resolving.degrees import PLANNABLE_SETTINGS
from plait.config.schema.config import Config
from plait.config.values.rules import describe_error
from plait.errors import ConfigError, Problem


def validate(tree: Mapping[str, Any], *, written: Mapping[str, str]) -> Config:
    """Return the Config of a tree.

    Args:
        tree: Settings under the names of the schema.
        written: Name of each setting in the file, by path of the schema.

    Raises:
        ConfigError: All problems.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(*problems_of(error.errors(include_url=False), written=written)) from None


def problems_of(errors: Sequence[ErrorDetails], *, written: Mapping[str, str]) -> list[Problem]:
    """Return the problems of pydantic's errors.

    pydantic reports each alternative of a union. They are combined to one problem per field.
    """
    errors_of: dict[str, list[ErrorDetails]] = {}
    for error in errors:
        errors_of.setdefault(_field_path(error["loc"]), []).append(error)

    problems = []
    for field, details in errors_of.items():
        problems += _field_problems(written.get(field, field), details)
    return problems


def _field_path(location: tuple[int | str, ...]) -> str:
    """Return the longest known path in the location of an error.

    pydantic adds the names of alternatives and the positions in lists.
    """
    longest = str(location[0]) if location else "the configuration"
    known = keys.known_paths()
    path = ""
    for name in location:
        path = f"{path}.{name}" if path else str(name)
        if path in known:
            longest = path
    return longest


def _field_problems(field: str, errors: list[ErrorDetails]) -> list[Problem]:
    value = errors[0]["input"]
    if errors[0]["type"] == "missing":
        return [Problem(field, None, "has to be given", "add it")]
    if errors[0]["type"] == "value_error":
        # Raised by a check of the schema, which may contain several problems.
        text = errors[0]["msg"].removeprefix("Value error, ")
        if isinstance(value, dict):
            value = None
        return [Problem(field, value, *_split(problem)) for problem in text.split(" Also: ")]
    if value == "auto" and field in PLANNABLE_SETTINGS:
        rule = "is answered by a plan, which only `plait train` makes by itself"
        remedy = "run `plait plan FILE --out planned.json` and take planned.json"
        return [Problem(field, value, rule, remedy)]

    descriptions = [describe_error(error) for error in errors]
    rules = dict.fromkeys(rule for rule, _ in descriptions)
    _, remedy = descriptions[0]
    return [Problem(field, value, f"must be {' or '.join(rules)}", remedy)]


def _split(text: str) -> tuple[str, str]:
    """Return (rule, remedy) of a text `rule; remedy`, the form of the schema's own checks."""
    rule, semicolon, remedy = text.rpartition("; ")
    if not semicolon:
        return text, "correct it"
    return rule, remedy
