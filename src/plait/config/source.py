"""Reader of configurations: JSON and YAML files, mappings, DeepSpeed's base64, and `--set a.b=c`.

The reader does not interpret keys. JSON may contain comments (`//`, `#`, `/* */`) and trailing
commas, as in DeepSpeed. A key that occurs twice in an object is refused; JSON and YAML libraries
would silently use the last one.

The resulting tree contains only objects, lists, strings, numbers and booleans, so that no later
code has to handle anything else. Numbers of hundreds of digits, lone surrogates, zero bytes,
unlimited nesting and YAML references that multiply are refused with their position in the file.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from plait.errors import ConfigError, Problem, raise_problems, shorten
from plait.files import is_file
from plait.names import similar_names

MAX_DIGITS = 300
"""Maximum number of digits of an integer. A number with more cannot be converted to a float."""
_MAX_DEPTH = 64
_MAX_VALUES = 200_000
_MAX_PROBLEMS = 20
_MAX_SHOWN = 200
"""Maximum number of characters of a path in a message."""


class OverlongNumber(str):
    """Number with more than `MAX_DIGITS` digits."""


Source = str | Path | Mapping[str, Any]
"""Source of a configuration: a path, base64 text or a mapping."""

_ROOT_RULE = "a configuration is an object of sections and keys"
_MAX_KEY_DEPTH = 32
_YAML_ERRORS = (
    yaml.YAMLError,
    RecursionError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
)
"""Errors of PyYAML for invalid text. Tags such as `!!int x` and `!!timestamp x` raise errors of
Python itself.
"""


@dataclass(frozen=True)
class Document:
    """Configuration that has been read and whose keys are not interpreted yet."""

    name: str
    """Name for messages: the path of the file, or a phrase if there is none."""
    tree: dict[str, Any]


def read(source: str | Path | Mapping[str, Any]) -> Document:
    """Read a configuration.

    Args:
        source: Path of a JSON or YAML file, DeepSpeed's base64 text, or a mapping, which is copied.

    Raises:
        ConfigError: The source is not a valid configuration. Syntax errors name line and column.
    """
    if isinstance(source, Mapping):
        name = "the configuration"
        # Checked before it is copied, because deepcopy recurses.
        refuse_unusable(source, name)
        return Document(name, copy.deepcopy(dict(source)))

    # A file of this name takes precedence over a text that happens to be base64.
    if isinstance(source, str) and not is_file(source):
        decoded = _from_base64(source)
        if decoded is not None:
            name = "the base64 configuration"
            return Document(name, _as_tree(_parse_json(decoded, name), name))

    path = Path(source)
    name = str(path)
    parse = _parse_yaml if path.suffix.lower() in (".yaml", ".yml") else _parse_json
    return Document(name, _as_tree(parse(_read_text(path), name), name))


def read_named(named: str, by: Document) -> Document:
    """Read a file that another file refers to.

    Args:
        named: Path, relative to the working folder or else to the folder of `by`.
        by: The file that contains the path.

    Raises:
        ConfigError: See `read`.
    """
    relative = os.path.join(os.path.dirname(by.name), named)
    if not is_file(named) and is_file(relative):
        return read(Path(relative))
    return read(Path(named))


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Parse an override `a.b=c`.

    Returns:
        The path ("a", "b") and the value: JSON, a scalar of YAML (`true`, `1e-4`, `null`), or text.

    Raises:
        ConfigError: The text is not an override.
    """
    # The first equals sign, because a value may contain others.
    path, equals, value = text.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or not all(keys) or len(keys) > _MAX_KEY_DEPTH:
        raise ConfigError(
            Problem(
                "--set",
                text,
                "an override is a dotted key, `=` and a value",
                "write for example --set zero_optimization.stage=3",
            )
        )
    parsed = scalar(value.strip())
    refuse_unusable({".".join(keys): parsed}, "--set")
    return keys, parsed


def scalar(text: str) -> Any:
    """Parse a value from the command line: JSON, a YAML scalar, or text."""
    try:
        # JSON first, because YAML accepts almost every text.
        return json.loads(text, parse_int=_parse_int)
    except (ValueError, RecursionError):
        pass
    try:
        value = yaml.load(text, _Loader)
    except (*_YAML_ERRORS, ConfigError):
        return text
    # YAML reads text with a colon or a leading dash as a mapping or a list.
    if isinstance(value, dict | list) and text[:1] not in "[{":
        return text
    return value


def _parse_int(text: str) -> Any:
    """Parse an integer, or return an `OverlongNumber`, which `refuse_unusable` reports."""
    return OverlongNumber(text) if len(text) > MAX_DIGITS else int(text)


def _read_text(path: Path) -> str:
    remedy = "pass the path of a JSON or YAML file"
    try:
        # Editors on Windows begin a file with a byte order mark, which plain UTF-8 would keep.
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        rule = "there is no such file"
        remedy = _similar_file(path)
    except IsADirectoryError:
        rule = "is a folder and not a file"
    except UnicodeDecodeError:
        rule = "is not text in UTF-8"
        remedy = "save it as UTF-8, or pass another file"
    except (OSError, ValueError) as error:
        # No permission, a path that is too long, or a zero byte in it.
        rule = f"cannot be read ({getattr(error, 'strerror', None) or error})"
    raise ConfigError(Problem(shorten(str(path), _MAX_SHOWN), None, rule, remedy))


def _similar_file(path: Path) -> str:
    try:
        files = list(path.parent.iterdir())
    except OSError:
        files = []
    names = [file.name for file in files if file.suffix.lower() in (".json", ".yaml", ".yml")]
    matches = similar_names(path.name, names)
    if matches:
        return f"did you mean {path.parent / matches[0]}?"
    return "pass the path of a JSON or YAML file"


def _as_tree(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        kind = _KINDS.get(type(value), "no object")
        raise ConfigError(
            Problem(
                name,
                None,
                f"is {kind}, but {_ROOT_RULE}",
                'write for example {"zero_optimization": {"stage": 2}}',
            )
        )
    refuse_unusable(value, name)
    return value


_KINDS = {
    type(None): "empty",
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    OverlongNumber: "a number",
}


def _from_base64(text: str) -> str | None:
    try:
        # DeepSpeed encodes with the alphabet for URLs.
        decoded = base64.urlsafe_b64decode(text.encode()).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    # Short texts, such as a file name, may be valid base64. Only an object, or a comment before
    # one, is a configuration.
    if decoded.lstrip()[:1] in ("{", "/", "#") and "{" in decoded:
        return decoded
    return None


_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|\#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])", re.DOTALL)


def _blank(match: re.Match[str]) -> str:
    """Replace a comment or comma with spaces, so that lines and columns in messages stay correct.

    The regular expressions also match strings, so that `//` inside a string starts no comment.
    """
    if match[0].startswith('"'):
        return match[0]
    return re.sub(r"[^\n]", " ", match[0])


def _parse_json(text: str, name: str) -> Any:
    # Comments first, because one may stand between a trailing comma and the bracket.
    strict = _TRAILING_COMMA.sub(_blank, _COMMENT.sub(_blank, text))
    duplicates: list[Problem] = []

    def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        items: dict[str, Any] = {}
        for key, value in pairs:
            if key in items:
                duplicates.append(_duplicate_key(f"{name}, {key}", items[key], value))
            items[key] = value
        return items

    try:
        value = json.loads(strict, object_pairs_hook=build_object, parse_int=_parse_int)
    except json.JSONDecodeError as error:
        lines = text.splitlines()
        line = ""
        if error.lineno <= len(lines):
            line = lines[error.lineno - 1].strip()[:60]
        remedy = f"correct it at `{line}`" if line else "add what is missing"
        raise ConfigError(
            Problem(
                f"{name}, line {error.lineno}, column {error.colno}",
                None,
                f"is not valid JSON here ({error.msg})",
                remedy,
            )
        ) from None
    except RecursionError:
        raise ConfigError(
            Problem(name, None, "is nested too deeply", "remove the nesting")
        ) from None
    raise_problems(duplicates)
    return value


def _duplicate_key(field: str, first: Any, second: Any) -> Problem:
    values = [shorten(json.dumps(value, default=str), 60) for value in (first, second)]
    return Problem(
        field,
        None,
        f"is given twice in one object, as {' and as '.join(values)}",
        "keep one of them",
    )


class _Loader(yaml.SafeLoader):
    """YAML loader that reads plain scalars as JSON does.

    `5e-5` is a number. `no`, `010` and `1:30` are not the boolean, octal and sexagesimal values of
    YAML 1.1, and dates are text.
    """


_SCALARS = {
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:int": (r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"[-+]?(?:(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?"
        r"|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))",
        "-+0123456789.",
    ),
}
"""Pattern of a plain scalar and its possible first characters, by the tag of its type."""


def _default_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return PyYAML's resolvers of plain scalars, except for those that `_Loader` replaces."""
    replaced = {*_SCALARS, "tag:yaml.org,2002:timestamp"}
    resolvers = {}
    for first, candidates in yaml.SafeLoader.yaml_implicit_resolvers.items():
        resolvers[first] = [(tag, pattern) for tag, pattern in candidates if tag not in replaced]
    return resolvers


_Loader.yaml_implicit_resolvers = _default_resolvers()
for _tag, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), list(_first))


def _construct_mapping(
    loader: _Loader, node: yaml.MappingNode, deep: bool = False
) -> dict[str, Any]:
    # Merge keys (`<<`) are resolved first, as in the constructor of PyYAML.
    loader.flatten_mapping(node)
    items: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key: Hashable = loader.construct_object(key_node, deep=True)
        value = loader.construct_object(value_node, deep=True)
        line = f"{loader.name}, line {key_node.start_mark.line + 1}"
        if not isinstance(key, str):
            raise ConfigError(
                Problem(f"{line}, key {key!r}", None, "keys must be strings", "quote it")
            )
        if key in items:
            raise ConfigError(_duplicate_key(f"{line}, {key}", items[key], value))
        items[key] = value
    return items


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> Any:
    # YAML 1.1 allows underscores between digits.
    return _parse_int(str(loader.construct_scalar(node)).replace("_", ""))


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def _parse_yaml(text: str, name: str) -> Any:
    try:
        loader = _Loader(text)
        # `_construct_mapping` names the file in its messages.
        loader.name = name
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        # Before its base class `YAMLError`, because only this one has a position.
        location = name
        mark = error.problem_mark
        if mark:
            location = f"{name}, line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(
            Problem(location, None, f"is not valid YAML here ({error.problem})", "correct it there")
        ) from None
    except RecursionError:
        raise ConfigError(
            Problem(name, None, "is nested too deeply", "remove the nesting")
        ) from None
    except _YAML_ERRORS as error:
        message = " ".join(str(error).split())[:200]
        raise ConfigError(
            Problem(name, None, f"is not valid YAML ({message})", "correct it")
        ) from None


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
            raise ConfigError(
                Problem(
                    name,
                    None,
                    f"contains more than {_MAX_VALUES:,} values (every use of a YAML alias counts)",
                    "keep only settings in the file",
                )
            )
        if depth > _MAX_DEPTH:
            raise ConfigError(
                Problem(
                    _printable(path),
                    None,
                    f"is nested more than {_MAX_DEPTH} deep",
                    "remove the nesting",
                )
            )

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
        return Problem(
            _printable(path),
            None,
            f"the key is a {type(key).__name__}, but keys are strings",
            "quote it",
        )
    if rule := _text_rule(key):
        return Problem(_printable(path), None, f"the key {rule}", "correct it")
    return None


def _value_problem(path: str, value: Any) -> Problem | None:
    # 3 bits per digit approximate the number of digits. Python refuses to convert very large
    # numbers to text, so the digits cannot be counted.
    too_long = type(value) is int and value.bit_length() > 3 * MAX_DIGITS
    if isinstance(value, OverlongNumber) or too_long:
        shown = f"{value[:12]}..." if isinstance(value, OverlongNumber) else None
        return Problem(
            _printable(path),
            shown,
            f"is a number of about {MAX_DIGITS} digits or more",
            "write a shorter one",
        )
    if isinstance(value, str) and (rule := _text_rule(value)):
        return Problem(_printable(path), value, rule, "correct it")
    if isinstance(value, bytes | bytearray | set | frozenset):
        return Problem(
            _printable(path),
            None,
            f"is of the type {type(value).__name__}",
            "write a string, a number, a list or an object",
        )
    return None


def _text_rule(text: str) -> str:
    """Return the rule that a string violates, or ""."""
    if "\0" in text:
        return "contains a zero byte"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "contains half of a character (a lone surrogate)"
    return ""


def _printable(path: str) -> str:
    """Return a path for a message: unprintable characters escaped, long paths truncated."""
    if not path:
        return "the configuration"
    if not path.isprintable():
        # `backslashreplace` keeps a zero byte, which is ASCII.
        path = path.encode("ascii", "backslashreplace").decode().replace("\0", "\\0")
    return shorten(path, _MAX_SHOWN)
