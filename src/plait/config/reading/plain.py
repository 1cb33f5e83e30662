"""What a configuration may be made of: objects, lists, texts, numbers and truth values, of a size
that a person writes.

Refuses by its place in the file what would otherwise end in an error of Python's somewhere later:
numbers of hundreds of digits, half characters, zero bytes, objects nested without end, YAML's
references that multiply. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import ConfigError, Problem, refuse

MOST_DIGITS = 300
"""Of a whole number: with more it is no float."""
_DEEPEST = 64
_MOST_VALUES = 200_000
_MOST_PROBLEMS = 20


class TooLong(str):
    """The digits of a number that is too long to be one."""


def refuse_unusable(tree: Mapping[Any, Any], name: str) -> None:
    """Raise ConfigError with each place in `tree` (read from `name`) that no setting can use."""
    problems: list[Problem] = []
    seen = 0
    left: list[tuple[str, int, Any]] = [("", 0, tree)]
    while left and len(problems) < _MOST_PROBLEMS:
        path, depth, value = left.pop()
        seen += 1
        if seen > _MOST_VALUES:
            rule = (
                f"holds more than {_MOST_VALUES:,} values (references of YAML are counted as often"
                " as they stand)"
            )
            raise ConfigError(Problem(name, None, rule, "write sections of keys"))
        if depth > _DEEPEST:
            raise ConfigError(
                Problem(
                    _shown(path),
                    None,
                    f"is nested more than {_DEEPEST} deep",
                    "write sections of keys",
                )
            )
        if isinstance(value, Mapping):
            for key, item in value.items():
                inner = f"{path}.{key}" if path else str(key)
                if not isinstance(key, str):
                    problems.append(
                        Problem(
                            _shown(inner),
                            None,
                            f"the key is a {type(key).__name__}, and keys are texts",
                            "quote it",
                        )
                    )
                elif rule := _text_rule(key):
                    problems.append(Problem(_shown(inner), None, f"the key {rule}", "correct it"))
                else:
                    left.append((inner, depth + 1, item))
        elif isinstance(value, list | tuple):
            left += [(f"{path}[{index}]", depth + 1, item) for index, item in enumerate(value)]
        elif problem := _problem_of(path, value):
            problems.append(problem)
    refuse(problems)


def _problem_of(path: str, value: Any) -> Problem | None:
    if isinstance(value, TooLong) or (type(value) is int and value.bit_length() > 3 * MOST_DIGITS):
        shown = f"{value[:12]}..." if isinstance(value, TooLong) else None
        return Problem(
            _shown(path),
            shown,
            f"is a number of about {MOST_DIGITS} digits or more",
            "write one that a computer can hold",
        )
    if isinstance(value, str) and (rule := _text_rule(value)):
        return Problem(_shown(path), value, rule, "correct it")
    if isinstance(value, bytes | bytearray | set | frozenset):
        return Problem(
            _shown(path),
            None,
            f"is of the type {type(value).__name__}",
            "write a text, a number, a list or an object",
        )
    return None


def _text_rule(text: str) -> str:
    if "\0" in text:
        return "holds a zero byte"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "holds half of a character (a lone surrogate)"
    return ""


def _shown(path: str) -> str:
    """A path as a message shows it: what cannot be printed escaped, what is endless cut."""
    text = (
        path.encode("ascii", "backslashreplace").decode().replace("\0", "\\0")
        if not path.isprintable()
        else path
    )
    return (text if len(text) <= 200 else f"{text[:197]}...") or "the configuration"
