"""Translation of a file's keys to the names of the schema, with `--set a.b=c` applied.

Every key is looked up: aliases are moved to their target, and all problems are collected. Each key
of the file becomes a `KeyReport` with its meaning; none is dropped silently. Values stay as
written, including "auto". An override replaces the file's value of the setting, whatever name the
file uses for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from plait.config.dialects import keys
from plait.config.dialects.deepspeed import SECRETS, TABLE, Key, requests_nothing, type_problem
from plait.config.dialects.keys import ABSENT, ALIASES, SHORT_FORMS
from plait.config.schema.config import PLAIT_SECTIONS, KeyReport, Provenance, Status
from plait.config.schema.optimizers import SINGLE_VALUED_PARAMS
from plait.config.source import Document
from plait.errors import Problem

Tree = dict[str, Any]


@dataclass
class WrittenValue:
    """Value of a setting, and the name of the setting in the file."""

    name: str
    value: Any


@dataclass
class ExaminedDocument:
    """Content of a document, translated to the names of the schema."""

    tree: Tree = field(default_factory=dict)
    """Settings under the names of the schema."""
    raw: Tree = field(default_factory=dict)
    """The file's content with overrides applied, under the names of the file."""
    rows: list[KeyReport] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    """Origin of each setting, by path: "file", "override", "file: tensor_parallel.tp_size"."""
    written: dict[str, str] = field(default_factory=dict)
    """Name of each setting in the file, by path."""
    candidates: dict[str, list[WrittenValue]] = field(default_factory=dict)
    """Values of each setting, by path. A file may contain a setting under several names."""

    def provenance(self, name: str) -> Provenance:
        """Return the provenance of a Config that is built from this document."""
        return Provenance(name, tuple(self.rows), dict(self.origins))


def examine(
    document: Document, overrides: Sequence[tuple[tuple[str, ...], Any]] = ()
) -> ExaminedDocument:
    """Translate every key of a document, with overrides applied.

    Args:
        document: The document.
        overrides: Pairs of path and value.

    Returns:
        The settings, and all problems. Nothing is raised.
    """
    # Overrides are applied to a copy: the caller keeps the document.
    tree = _copy_tree(document.tree)
    examined = ExaminedDocument(raw=tree)
    for path, value in overrides:
        problem = apply_override(tree, path, value)
        if problem is not None:
            examined.problems.append(problem)

    _visit_section((), (), tree, examined)
    overridden = {".".join(path) for path, _ in overrides}
    # After all keys are known: a setting may occur under several names.
    for target, candidates in examined.candidates.items():
        _set_value(target, candidates, examined, overridden)
    return examined


def value_at(tree: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path of a tree, or None if the path does not exist."""
    value: Any = tree
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def is_comment(name: str) -> bool:
    """Return True for keys that files use for remarks: `_comment`, `comment`, `//`, `#note`."""
    return name.startswith(("_", "//", "#")) or name.lower() in ("comment", "comments")


_BRIEF_LENGTH = 60
"""Length from which one sentence of a description is enough."""


def brief(text: str) -> str:
    """Return the first sentence of a description on one line, and the second if it is short.

    The first one names the setting. The second one often names its values.
    """
    sentences = re.split(r"(?<=\.) ", " ".join(text.split()))
    count = 2 if len(sentences[0]) < _BRIEF_LENGTH else 1
    return " ".join(sentences[:count])


def _copy_tree(value: Any) -> Any:
    """Copy objects and lists, and convert tuples to lists as in JSON."""
    if isinstance(value, dict):
        return {key: _copy_tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy_tree(item) for item in value]
    return value


def _visit_section(
    written: tuple[str, ...], path: tuple[str, ...], tree: Tree, examined: ExaminedDocument
) -> None:
    for name, value in tree.items():
        _visit((*written, str(name)), (*path, str(name)), value, examined)


def _visit(
    written: tuple[str, ...], path: tuple[str, ...], value: Any, examined: ExaminedDocument
) -> None:
    """Translate a key of the file.

    Args:
        written: Names of the key in the file, from the outermost section.
        path: Names of the key after renaming its sections.
        value: Value of the key.
        examined: Result, which is extended.
    """
    shown = ".".join(written)
    dotted = ".".join(path)
    if is_comment(path[-1]):
        examined.rows.append(KeyReport(shown, value, Status.COMMENT, "a remark", dotted))
    # null stands for a key that is left out, but an unknown key is still a mistake.
    elif value is None and dotted in keys.known_paths():
        examined.rows.append(KeyReport(shown, value, Status.COMMENT, "null: not given", dotted))
    elif dotted in ALIASES:
        _visit_alias(written, dotted, value, examined)
    elif dotted in TABLE:
        _visit_table(shown, TABLE[dotted], value, examined)
    elif dotted in keys.schema_fields():
        _visit_field(written, dotted, value, examined)
    elif dotted in keys.sections():
        if dotted in SHORT_FORMS:
            value = SHORT_FORMS[dotted](value)
        _visit_known_section(written, path, value, examined)
    else:
        examined.problems.append(
            Problem(shown, value, "unknown key", keys.remedy_for(".".join(path[:-1]), path[-1]))
        )


def _visit_known_section(
    written: tuple[str, ...], path: tuple[str, ...], value: Any, examined: ExaminedDocument
) -> None:
    shown = ".".join(written)
    dotted = ".".join(path)
    if isinstance(value, dict):
        if dotted in keys.schema_sections():
            # An empty section such as `"run": {}` requests its defaults.
            _section(examined.tree, path)
        _visit_section(written, path, value, examined)
    elif value is False and dotted.split(".")[0] not in PLAIT_SECTIONS:
        # DeepSpeed accepts false in place of a section.
        examined.rows.append(
            KeyReport(shown, value, Status.IGNORED, "false: the section is left out", dotted)
        )
    else:
        names = keys.names_in(dotted)
        typical = ("enabled", "stage", "type", "device", "tp_size", "path")
        example = next((name for name in typical if name in names), names[0])
        examined.problems.append(
            Problem(
                shown,
                value,
                "is a section, which must be an object",
                f'write for example {{"{example}": ...}}',
            )
        )


def _visit_alias(
    written: tuple[str, ...], dotted: str, value: Any, examined: ExaminedDocument
) -> None:
    alias = ALIASES[dotted]
    shown = ".".join(written)
    target = tuple(alias.target.split("."))
    if alias.target in keys.sections():
        _visit_known_section(written, target, value, examined)
        return

    converted = alias.convert(value)
    if converted is ABSENT:
        examined.rows.append(
            KeyReport(
                shown,
                value,
                Status.RENAMED,
                f"{alias.target}, not set by this value ({alias.note})",
                alias.target,
            )
        )
        return
    if alias.target in TABLE:
        _visit_table(shown, TABLE[alias.target], converted, examined)
        return
    examined.rows.append(
        KeyReport(shown, value, Status.RENAMED, f"{alias.target} ({alias.note})", alias.target)
    )
    examined.candidates.setdefault(alias.target, []).append(WrittenValue(shown, converted))


def _visit_field(
    written: tuple[str, ...], dotted: str, value: Any, examined: ExaminedDocument
) -> None:
    setting = keys.schema_fields()[dotted]
    shown = ".".join(written)
    if setting.free and isinstance(value, dict):
        value = _visit_free(written, dotted, value, examined)
    else:
        examined.rows.append(
            KeyReport(shown, value, Status.SUPPORTED, brief(setting.description), dotted)
        )
    examined.candidates.setdefault(dotted, []).append(WrittenValue(shown, value))


_FREE_MEANINGS = {
    "optimizer.params": "a parameter of the optimizer",
    "scheduler.params": "a parameter of the schedule",
    "model.config": "a field of the Transformers configuration",
    "parallel.plan": "a pattern of modules and how they are split",
}
"""Meaning of the keys of a free field, by the path of the field."""


def _visit_free(
    written: tuple[str, ...], dotted: str, value: Tree, examined: ExaminedDocument
) -> Tree:
    """Translate the keys of a free-form field, an object whose keys the schema does not list.

    Returns:
        The object without comments and without the keys that DeepSpeed defines.
    """
    settings: Tree = {}
    for name, item in value.items():
        shown = ".".join((*written, str(name)))
        inner = f"{dotted}.{name}"
        if inner in TABLE:
            _visit_table(shown, TABLE[inner], item, examined)
            continue
        if is_comment(str(name)):
            examined.rows.append(KeyReport(shown, item, Status.COMMENT, "a remark", inner))
            continue

        settings[name] = item
        status = Status.SUPPORTED
        meaning = _FREE_MEANINGS.get(dotted, f"part of {dotted}")
        if dotted == "optimizer.params" and name in SINGLE_VALUED_PARAMS:
            # DeepSpeed's parameters with a single supported value have no effect.
            status = Status.IGNORED
            meaning = SINGLE_VALUED_PARAMS[name][1]
        examined.rows.append(KeyReport(shown, item, status, meaning, inner))
    return settings


def _visit_table(shown: str, key: Key, value: Any, examined: ExaminedDocument) -> None:
    problem = type_problem(key, value)
    if key.path in SECRETS:
        # Neither the rows nor the problems below show a secret.
        value = "(not shown)"
    if problem is not None:
        examined.problems.append(Problem(shown, value, *problem))
        return

    status = key.status
    meaning = key.why
    if key.status is Status.REFUSED and requests_nothing(key, value):
        status = Status.IGNORED
        meaning = f"this value requests nothing; other values are refused: {key.why}"
    elif key.status is Status.REFUSED:
        examined.problems.append(Problem(shown, value, key.why, key.remedy))

    if shown != key.path:
        meaning = f"{key.path}: {meaning}"
    examined.rows.append(KeyReport(shown, value, status, meaning, key.path))


def _set_value(
    target: str, candidates: list[WrittenValue], examined: ExaminedDocument, overridden: set[str]
) -> None:
    """Store the value of a setting, or report conflicting values.

    If a setting occurs under two names, a value takes precedence over "auto".
    """
    explicit = [candidate for candidate in candidates if candidate.value != "auto"]
    first, *others = explicit or candidates
    for other in others:
        if not _same_value(target, first.value, other.value):
            both = " and ".join(
                f"{candidate.name} = {json.dumps(candidate.value, default=str)}"
                for candidate in (first, other)
            )
            examined.problems.append(
                Problem(both, None, f"both set {target} and disagree", "keep one of them")
            )
            return

    *parents, last = target.split(".")
    _section(examined.tree, parents)[last] = first.value
    origin = _origin(first.name, overridden)
    if first.name != target:
        origin = f"{origin}: {first.name}"
    examined.origins[target] = origin
    examined.written[target] = first.name


def _same_value(target: str, value: Any, other: Any) -> bool:
    """Return True if a setting parses both values to an equal value, such as `8` and `"8"`."""
    if value == other:
        return True
    if target not in keys.schema_fields():
        return False
    adapter = keys.value_adapter(target)
    try:
        return bool(adapter.validate_python(value) == adapter.validate_python(other))
    except ValidationError:
        return False


def _section(tree: Tree, path: Sequence[str]) -> Tree:
    """Return the section at a path. Missing sections are added."""
    for name in path:
        tree = tree.setdefault(name, {})
    return tree


def _origin(written: str, overridden: set[str]) -> str:
    if any(written == path or written.startswith(f"{path}.") for path in overridden):
        return "override"
    if any(path.startswith(f"{written}.") for path in overridden):
        # An override has replaced a part of what the file has.
        return "file and override"
    return "file"


def apply_override(tree: Tree, path: tuple[str, ...], value: Any) -> Problem | None:
    """Set a value in a tree, after removing the same setting under its other names.

    Args:
        tree: The file's content, which is modified.
        path: Names of the key, from the outermost section.
        value: New value; None removes the key.

    Returns:
        A problem if the path leads through a value that is not a section.
    """
    dotted = ".".join(path)
    target = _target(dotted)
    # A section written as a number has no keys that could be replaced.
    _expand_short_forms(tree, target)
    # A list of all leaves, so that the loop can remove some of them.
    for leaf in _leaves(tree, ()):
        name = ".".join(leaf)
        if name != dotted and _target(name) == target:
            _remove(tree, leaf)

    if value is None:
        _remove(tree, path)
        return None

    section = tree
    for depth, name in enumerate(path[:-1], start=1):
        # null and false are the forms of an omitted section.
        if section.get(name) in (None, False):
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):
            shown = ".".join(path[:depth])
            return Problem(
                f"--set {dotted}",
                value,
                f"{shown} is {section!r} and has no keys in it",
                f"set {shown} itself",
            )
    section[path[-1]] = value
    return None


def _target(path: str) -> str:
    """Return the path of a setting after renaming the key or its section."""
    alias = ALIASES.get(path)
    if alias is not None:
        return alias.target
    section, _, name = path.partition(".")
    if section in ALIASES:
        return f"{ALIASES[section].target}.{name}"
    return path


def _expand_short_forms(tree: Tree, target: str) -> None:
    """Expand the short form of each section that may contain `target` to the full section."""
    for section, expand in SHORT_FORMS.items():
        if section not in tree:
            continue
        names = [path for path, alias in ALIASES.items() if alias.target == target]
        if any(name.startswith(f"{section}.") for name in (target, *names)):
            tree[section] = expand(tree[section])


def _leaves(tree: Tree, prefix: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the paths of all settings. Objects that are values of settings are not searched."""
    leaves: list[tuple[str, ...]] = []
    for name, value in tree.items():
        path = (*prefix, name)
        # The value of a setting such as `optimizer.params` can also be an object.
        if isinstance(value, dict) and ".".join(path) not in keys.schema_fields():
            leaves += _leaves(value, path)
        else:
            leaves.append(path)
    return leaves


def _remove(tree: Tree, path: tuple[str, ...]) -> None:
    for name in path[:-1]:
        if not isinstance(tree.get(name), dict):
            return
        tree = tree[name]
    tree.pop(path[-1], None)
