"""From what was written to what the schema takes: every key looked up, other names moved to their
target, every problem collected.

Nothing is dropped silently: each key of the file becomes a `Row` that says what it means. Nothing
is resolved here: "auto" stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from plait.config.dialects import keys
from plait.config.dialects.aliases import ABSENT, ALIASES, SHORT_FORMS
from plait.config.dialects.deepspeed import SECRETS, TABLE, Key
from plait.config.dialects.overrides import apply_override
from plait.config.dialects.table_values import asks_for_nothing, type_problem
from plait.config.reading.source import Document
from plait.config.schema.config import PLAIT_SECTIONS
from plait.config.schema.optimizers import ONLY
from plait.config.schema.provenance import Provenance, Row, Status
from plait.errors import Problem

Tree = dict[str, Any]


@dataclass
class Candidate:
    """One value for a target, under the name it was written with."""

    written: str
    value: Any


@dataclass
class Examined:
    """What a document says, so far."""

    tree: Tree = field(default_factory=dict)
    """The same settings under the schema's names."""
    raw: Tree = field(default_factory=dict)
    """The file with the overrides applied, its keys as written."""
    rows: list[Row] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    """Schema path -> "file", "override", "file: tensor_parallel.tp_size"."""
    written: dict[str, str] = field(default_factory=dict)
    """Schema path -> the name it was written with."""
    candidates: dict[str, list[Candidate]] = field(default_factory=dict)
    deepspeed: bool = True

    def provenance(self, name: str) -> Provenance:
        """What a Config keeps of this."""
        return Provenance(name, self.deepspeed, tuple(self.rows), dict(self.origins))


def examine(document: Document, overrides: Sequence[tuple[tuple[str, ...], Any]] = ()) -> Examined:
    """Look at every key of `document` with `overrides` applied. Whether it is a DeepSpeed file does
    not depend on the overrides.
    """
    found = Examined(deepspeed=not set(PLAIT_SECTIONS) & set(document.tree))
    tree = _json_like(document.tree)
    for path, value in overrides:
        problem = apply_override(tree, path, value)
        if problem is not None:
            found.problems.append(problem)
    found.raw = tree
    _visit_section((), (), tree, found)
    overridden = {".".join(path) for path, _ in overrides}
    for target, candidates in found.candidates.items():
        _decide(target, candidates, found, overridden)
    return found


def at_path(tree: Mapping[str, Any], path: str) -> Any:
    """What stands at a dotted path; None where nothing does."""
    here: Any = tree
    for name in path.split("."):
        if not isinstance(here, Mapping):
            return None
        here = here.get(name)
    return here


def is_comment(name: str) -> bool:
    """Keys that published files use for remarks: `_comment`, `comment`, `//`, `#note`."""
    return name.startswith(("_", "//", "#")) or name.lower() in ("comment", "comments")


def first_sentence(text: str) -> str:
    """The first sentence of a description, on one line."""
    line = " ".join(text.split())
    end = line.find(". ")
    return line if end < 0 else line[: end + 1]


def _json_like(value: Any) -> Any:
    """Containers copied, tuples as lists."""
    if isinstance(value, dict):
        return {key: _json_like(item) for key, item in value.items()}
    return [_json_like(item) for item in value] if isinstance(value, list | tuple) else value


def _visit_section(
    written: tuple[str, ...], path: tuple[str, ...], tree: Tree, found: Examined
) -> None:
    for name, value in tree.items():
        _visit((*written, str(name)), (*path, str(name)), value, found)


def _visit(written: tuple[str, ...], path: tuple[str, ...], value: Any, found: Examined) -> None:
    """`written` is how the file names it; `path` is the same under the names the tables know."""
    shown = ".".join(written)
    dotted = ".".join(path)
    if is_comment(path[-1]):
        found.rows.append(Row(shown, value, Status.COMMENT, "a remark", dotted))
    elif value is None and dotted in keys.known():
        found.rows.append(Row(shown, value, Status.COMMENT, "null: not given", dotted))
    elif dotted in ALIASES:
        _visit_alias(written, dotted, value, found)
    elif dotted in TABLE:
        _visit_table(shown, TABLE[dotted], value, found)
    elif dotted in keys.fields():
        _visit_field(written, dotted, value, found)
    elif dotted in keys.sections():
        _visit_known_section(
            written, path, SHORT_FORMS.get(dotted, lambda same: same)(value), found
        )
    else:
        remedy = keys.remedy_for(".".join(path[:-1]), path[-1])
        found.problems.append(Problem(shown, value, "unknown key", remedy))


def _visit_known_section(
    written: tuple[str, ...], path: tuple[str, ...], value: Any, found: Examined
) -> None:
    shown = ".".join(written)
    dotted = ".".join(path)
    if isinstance(value, dict):
        if dotted in keys.schema_sections():
            _section(found.tree, path)  # `"run": {}` asks for the section with its defaults
        _visit_section(written, path, value, found)
    elif value is False and dotted.split(".")[0] not in PLAIT_SECTIONS:
        found.rows.append(
            Row(shown, value, Status.IGNORED, "false: the section is left out", dotted)
        )
    else:
        inside = keys.inside(dotted)
        example = next(
            (
                name
                for name in ("enabled", "stage", "type", "device", "tp_size", "path")
                if name in inside
            ),
            inside[0],
        )
        found.problems.append(
            Problem(
                shown,
                value,
                "is a section and needs an object",
                f'write for example {{"{example}": ...}}',
            )
        )


def _visit_alias(written: tuple[str, ...], dotted: str, value: Any, found: Examined) -> None:
    alias = ALIASES[dotted]
    shown = ".".join(written)
    target = tuple(alias.target.split("."))
    if alias.target in keys.sections():
        _visit_known_section(written, target, value, found)
        return
    converted = alias.convert(value)
    if converted is ABSENT:
        found.rows.append(
            Row(
                shown,
                value,
                Status.RENAMED,
                f"{alias.target}, not set by this value ({alias.note})",
                alias.target,
            )
        )
        return
    if alias.target in TABLE:
        _visit_table(shown, TABLE[alias.target], converted, found)
        return
    found.rows.append(
        Row(shown, value, Status.RENAMED, f"{alias.target} ({alias.note})", alias.target)
    )
    found.candidates.setdefault(alias.target, []).append(Candidate(shown, converted))


def _visit_field(written: tuple[str, ...], dotted: str, value: Any, found: Examined) -> None:
    setting = keys.fields()[dotted]
    shown = ".".join(written)
    if setting.free and isinstance(value, dict):
        value = _visit_free(written, dotted, value, found)
    else:
        found.rows.append(
            Row(shown, value, Status.SUPPORTED, first_sentence(setting.description), dotted)
        )
    found.candidates.setdefault(dotted, []).append(Candidate(shown, value))


_FREE = {
    "optimizer.params": "a parameter of the optimizer",
    "scheduler.params": "a parameter of the schedule",
    "model.config": "a field of the Transformers configuration",
    "parallel.plan": "a pattern of modules and how they are split",
}


def _visit_free(written: tuple[str, ...], dotted: str, value: Tree, found: Examined) -> Tree:
    """The keys of an object that the schema does not list, less those that the table knows to mean
    nothing.
    """
    kept: Tree = {}
    for name, item in value.items():
        shown = ".".join((*written, str(name)))
        inner = f"{dotted}.{name}"
        if inner in TABLE:
            _visit_table(shown, TABLE[inner], item, found)
        elif is_comment(str(name)):
            found.rows.append(Row(shown, item, Status.COMMENT, "a remark", inner))
        else:
            kept[name] = item
            only = dotted == "optimizer.params" and name in ONLY
            meaning = ONLY[name][1] if only else _FREE.get(dotted, f"part of {dotted}")
            found.rows.append(
                Row(shown, item, Status.IGNORED if only else Status.SUPPORTED, meaning, inner)
            )
    return kept


def _visit_table(shown: str, key: Key, value: Any, found: Examined) -> None:
    wrong = type_problem(key, value)
    if wrong is not None:
        found.problems.append(Problem(shown, value, *wrong))
        return
    value = "(not shown)" if key.path in SECRETS else value
    name = f"{key.path}: " if shown != key.path else ""
    status = key.status
    meaning = key.why
    if key.status is Status.REFUSED and asks_for_nothing(key, value):
        status = Status.IGNORED
        meaning = f"this value asks for nothing; another would be refused: {key.why}"
    elif key.status is Status.REFUSED:
        found.problems.append(Problem(shown, value, key.why, key.remedy))
    found.rows.append(Row(shown, value, status, name + meaning, key.path))


def _decide(
    target: str, candidates: list[Candidate], found: Examined, overridden: set[str]
) -> None:
    """Put the one value in the tree, or refuse two that disagree. A value overrides "auto"."""
    said = [c for c in candidates if c.value != "auto"] or candidates
    first = said[0]
    for other in said[1:]:
        if not _alike(target, first.value, other.value):
            both = " and ".join(
                f"{c.written} = {json.dumps(c.value, default=str)}" for c in (first, other)
            )
            found.problems.append(
                Problem(both, None, f"both set {target} and disagree", "keep one of them")
            )
            return
    *parents, last = target.split(".")
    _section(found.tree, parents)[last] = first.value
    source = _origin(first.written, overridden)
    found.origins[target] = f"{source}: {first.written}" if first.written != target else source
    found.written[target] = first.written


def _alike(target: str, value: Any, other: Any) -> bool:
    """Whether two values mean the same to the setting, however they are written (`8` and `"8"`,
    `fp32` and `float32`).
    """
    if value == other:
        return True
    if target not in keys.fields():
        return False
    reads = keys.values_of(target)
    try:
        return bool(reads.validate_python(value) == reads.validate_python(other))
    except ValidationError:
        return False


def _section(tree: Tree, path: Sequence[str]) -> Tree:
    for name in path:
        tree = tree.setdefault(name, {})
    return tree


def _origin(written: str, overridden: set[str]) -> str:
    if any(written == path or written.startswith(f"{path}.") for path in overridden):
        return "override"
    return (
        "file and override"
        if any(path.startswith(f"{written}.") for path in overridden)
        else "file"
    )
