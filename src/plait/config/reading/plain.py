"""Limits on the content of a configuration.

A configuration consists of objects, lists, texts, numbers and booleans, of a size that a person
writes. Anything else is refused here with its place in the file, because it would raise an
unrelated error later: numbers of hundreds of digits, lone surrogates, zero bytes, objects that are
nested without limit, and YAML references that multiply. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import ConfigError, Problem, raise_problems

MAX_DIGITS = 300
"""Maximum number of digits of an integer. A number with more cannot be converted to a float."""
_MAX_DEPTH = 64
_MAX_VALUES = 200_000
_MAX_PROBLEMS = 20
_MAX_SHOWN = 200
"""Maximum number of characters of a path in a message."""


class TooLong(str):
    """Digits of a number that exceeds `MAX_DIGITS`."""


def refuse_unusable(tree: Mapping[Any, Any], name: str) -> None:
    """Check that a tree contains only values that a setting can have.

    Args:
        tree: The parsed configuration.
        name: Name of the configuration for messages.

    Raises:
        ConfigError: A value is unusable. The error lists all of them, up to a limit.
    """
    problems: list[Problem] = []
    visited = 0
    # A stack instead of recursion: a tree that is nested too deeply would exhaust Python's stack.
    pending: list[tuple[str, int, Any]] = [("", 0, tree)]
    while pending and len(problems) < _MAX_PROBLEMS:
        path, depth, value = pending.pop()
        visited += 1
        if visited > _MAX_VALUES:
            rule = f"contains more than {_MAX_VALUES:,} values (every use of a YAML alias counts)"
            raise ConfigError(Problem(name, None, rule, "keep only settings in the file"))
        if depth > _MAX_DEPTH:
            rule = f"is nested more than {_MAX_DEPTH} deep"
            raise ConfigError(Problem(_printable(path), None, rule, "remove the nesting"))

        if isinstance(value, Mapping):
            for key, item in value.items():
                inner = f"{path}.{key}" if path else str(key)
                problem = _key_problem(inner, key)
                if problem is not None:
                    problems.append(problem)
                else:
                    pending.append((inner, depth + 1, item))
        elif isinstance(value, list | tuple):
            pending += [(f"{path}[{index}]", depth + 1, item) for index, item in enumerate(value)]
        elif problem := _value_problem(path, value):
            problems.append(problem)
    raise_problems(problems)


def _key_problem(path: str, key: Any) -> Problem | None:
    if not isinstance(key, str):
        rule = f"the key is a {type(key).__name__}, and keys are texts"
        return Problem(_printable(path), None, rule, "quote it")
    if rule := _text_rule(key):
        return Problem(_printable(path), None, f"the key {rule}", "correct it")
    return None


def _value_problem(path: str, value: Any) -> Problem | None:
    # 3 bits per digit approximate the number of digits. Python refuses to convert very large
    # numbers to text, so the digits cannot be counted.
    too_long = type(value) is int and value.bit_length() > 3 * MAX_DIGITS
    if isinstance(value, TooLong) or too_long:
        shown = f"{value[:12]}..." if isinstance(value, TooLong) else None
        return Problem(
            _printable(path),
            shown,
            f"is a number of about {MAX_DIGITS} digits or more",
            "write one that a computer can hold",
        )
    if isinstance(value, str) and (rule := _text_rule(value)):
        return Problem(_printable(path), value, rule, "correct it")
    if isinstance(value, bytes | bytearray | set | frozenset):
        return Problem(
            _printable(path),
            None,
            f"is of the type {type(value).__name__}",
            "write a text, a number, a list or an object",
        )
    return None


def _text_rule(text: str) -> str:
    """Return the rule that a text violates, or an empty string."""
    if "\0" in text:
        return "holds a zero byte"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "holds half of a character (a lone surrogate)"
    return ""


def _printable(path: str) -> str:
    """Return a path for a message: unprintable characters escaped, long paths cut."""
    if not path:
        return "the configuration"
    if not path.isprintable():
        path = path.encode("ascii", "backslashreplace").decode().replace("\0", "\\0")
    if len(path) > _MAX_SHOWN:
        return f"{path[: _MAX_SHOWN - 3]}..."
    return path
