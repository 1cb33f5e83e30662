"""Reading a configuration: a path to JSON or YAML, a mapping, DeepSpeed's base64, and `--set
a.b=c`.

Only text becomes a tree here; what the keys mean is not looked at. Comments (`//`, `#`, `/* */`)
and trailing commas are tolerated in JSON as DeepSpeed does. A key given twice is refused, never the
last one taken. What comes out is made of objects, lists, texts, numbers and truth values (`plain`),
so that nothing later has to expect anything else.
"""

from __future__ import annotations

import base64
import binascii
import copy
import difflib
import json
import os
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from plait.config.reading.plain import MOST_DIGITS, TooLong, refuse_unusable
from plait.errors import ConfigError, Problem, refuse

Source = str | Path | Mapping[str, Any]
"""What a configuration can be read from."""

_ROOT = "a configuration is an object of sections and keys"
_DEEPEST_KEY = 32
_NOT_YAML = (
    yaml.YAMLError,
    ConfigError,
    RecursionError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
)
"""What PyYAML raises for a text that is no YAML: `!!int x`, `!!timestamp x` and the like end in
errors of Python's own.
"""


@dataclass(frozen=True)
class Document:
    """What was read."""

    name: str
    """For messages: the file name, or what was given instead."""
    tree: dict[str, Any]


def read(source: str | Path | Mapping[str, Any]) -> Document:
    """The tree in a file, in a base64 text or in a mapping (copied). Raises ConfigError with file,
    line and column where there are some.
    """
    if isinstance(source, Mapping):
        refuse_unusable(source, "the configuration")
        return Document(
            "the configuration", _as_tree(copy.deepcopy(dict(source)), "the configuration")
        )
    if isinstance(source, str) and not _is_file(source):
        decoded = _from_base64(source)
        if decoded is not None:
            name = "the base64 configuration"
            return Document(name, _as_tree(_parse_json(decoded, name), name))
    path = Path(source)
    text = _text_of(path)
    parse = _parse_yaml if path.suffix.lower() in (".yaml", ".yml") else _parse_json
    return Document(str(path), _as_tree(parse(text, str(path)), str(path)))


def read_named(named: str, by: Document) -> Document:
    """The file that a value of another file names, as a path from the working folder or else from
    that file's. Raises ConfigError.
    """
    beside = os.path.join(os.path.dirname(by.name), named)
    return read(Path(beside if not _is_file(named) and _is_file(beside) else named))


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """`a.b=c` as (("a", "b"), value). The value is JSON, or a scalar of YAML (`true`, `1e-4`,
    `null`), or else text. Raises ConfigError.
    """
    path, equals, value = text.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or not all(keys) or len(keys) > _DEEPEST_KEY:
        raise ConfigError(
            Problem(
                "--set",
                text,
                "an override is a dotted key, `=` and a value",
                "write for example --set zero_optimization.stage=3",
            )
        )
    found = scalar(value.strip())
    refuse_unusable({".".join(keys): found}, "--set")
    return keys, found


def scalar(text: str) -> Any:
    """The value that a text on the command line stands for."""
    try:
        return json.loads(text, parse_int=_whole)
    except (ValueError, RecursionError):
        pass
    try:
        value = yaml.load(text, _Loader)
    except _NOT_YAML:
        return text
    return text if isinstance(value, dict | list) and text[:1] not in "[{" else value


def _whole(text: str) -> Any:
    """A whole number; one of too many digits as what `refuse_unusable` names, because Python and
    every dtype end before it.
    """
    return int(text) if len(text) <= MOST_DIGITS else TooLong(text)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a path, or with a zero byte
        return False


def _text_of(path: Path) -> str:
    shown = str(path) if len(str(path)) <= 200 else f"{str(path)[:200]}..."
    remedy = "give the path of a JSON or YAML file"
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        rule = "there is no such file"
        remedy = _near_file(path)
    except IsADirectoryError:
        rule = "is a folder and not a file"
    except UnicodeDecodeError:
        rule = "is not text in UTF-8"
    except (
        OSError,
        ValueError,
    ) as error:  # no permission, a name that is too long, a zero byte in it
        rule = f"cannot be read ({getattr(error, 'strerror', None) or error})"
    raise ConfigError(Problem(shown, None, rule, remedy))


def _near_file(path: Path) -> str:
    try:
        beside = [
            p.name for p in path.parent.iterdir() if p.suffix.lower() in (".json", ".yaml", ".yml")
        ]
    except OSError:
        beside = []
    near = difflib.get_close_matches(path.name, beside, n=1)
    if near:
        return f"did you mean {path.parent / near[0]}?"
    return "give the path of a JSON or YAML file"


def _as_tree(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        kind = "empty" if value is None else _KINDS.get(type(value), "no object")
        raise ConfigError(
            Problem(
                name,
                None,
                f"is {kind}, and {_ROOT}",
                'write for example {"zero_optimization": {"stage": 2}}',
            )
        )
    refuse_unusable(value, name)
    return value


_KINDS = {
    list: "a list",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "a truth value",
    TooLong: "a number",
}


def _from_base64(text: str) -> str | None:
    try:
        decoded = base64.urlsafe_b64decode(text.encode()).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return decoded if decoded.lstrip()[:1] in ("{", "/", "#") and "{" in decoded else None


_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|\#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])", re.DOTALL)


def _blank(match: re.Match[str]) -> str:
    """Strings stay; anything else becomes spaces, so that lines and columns in messages stay
    true.
    """
    return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])


def _parse_json(text: str, name: str) -> Any:
    plain = _TRAILING_COMMA.sub(_blank, _COMMENT.sub(_blank, text))
    twice: list[Problem] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                twice.append(_given_twice(key, seen[key], value))
            seen[key] = value
        return seen

    try:
        value = json.loads(plain, object_pairs_hook=once, parse_int=_whole)
    except json.JSONDecodeError as error:
        lines = text.splitlines()
        near = lines[error.lineno - 1].strip()[:60] if error.lineno <= len(lines) else ""
        where = f"{name}, line {error.lineno}, column {error.colno}"
        raise ConfigError(
            Problem(
                where,
                None,
                f"is not valid JSON here ({error.msg})",
                f"correct it at `{near}`" if near else "add what is missing",
            )
        ) from None
    except RecursionError:
        raise ConfigError(
            Problem(name, None, "is nested too deeply", "write sections of keys")
        ) from None
    refuse(twice)
    return value


def _given_twice(key: str, first: Any, second: Any) -> Problem:
    return Problem(
        key,
        None,
        f"is given twice in one object, as {_short(first)} and as {_short(second)}",
        "keep one of them",
    )


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Loader(yaml.SafeLoader):
    """YAML whose plain words are JSON's: `5e-5` is a number, `no`, `010` and `1:30` are not what
    YAML 1.1 makes of them, dates are text.
    """


_WORDS = {
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:int": (r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"[-+]?(?:(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))",
        "-+0123456789.",
    ),
}
_OTHERS = {*_WORDS, "tag:yaml.org,2002:timestamp"}

_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OTHERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, (_pattern, _first) in _WORDS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), list(_first))


def _mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
    loader.flatten_mapping(node)
    seen: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key: Hashable = loader.construct_object(key_node, deep=True)
        value = loader.construct_object(value_node, deep=True)
        where = f"line {key_node.start_mark.line + 1}"
        if not isinstance(key, str):
            raise ConfigError(Problem(f"{where}, key {key!r}", None, "keys are text", "quote it"))
        if key in seen:
            problem = _given_twice(key, seen[key], value)
            raise ConfigError(Problem(f"{where}, {key}", None, problem.rule, problem.remedy))
        seen[key] = value
    return seen


def _number(loader: _Loader, node: yaml.ScalarNode) -> Any:
    return _whole(str(loader.construct_scalar(node)).replace("_", ""))


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _number)


def _parse_yaml(text: str, name: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        raise ConfigError(
            Problem(where, None, f"is not valid YAML here ({error.problem})", "correct it there")
        ) from None
    except RecursionError:
        raise ConfigError(
            Problem(name, None, "is nested too deeply", "write sections of keys")
        ) from None
    except ConfigError:
        raise
    except _NOT_YAML as error:
        raise ConfigError(
            Problem(
                name,
                None,
                f"is not valid YAML ({' '.join(str(error).split())[:200]})",
                "correct it",
            )
        ) from None
