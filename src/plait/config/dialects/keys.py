"""Every key that a file may contain, in one index: fields of the schema, keys of the DeepSpeed
table, and other names.

Built once from the three. It answers what a dotted path is, what is known inside a section, and
what a wrong name was meant to be.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import TypeAdapter

from plait.config.dialects.aliases import ALIASES
from plait.config.dialects.deepspeed import TABLE
from plait.config.schema.config import Config
from plait.policy import Policy

_LONGEST_NAME = 100
"""A longer name is no misspelt one."""


@dataclass(frozen=True)
class Field:
    """One setting of the schema."""

    path: str
    description: str
    free: bool
    """Its value is an object with keys that the schema does not list (`model.config`,
    `optimizer.params`).
    """
    annotation: Any
    """Its type with everything that is asked of a value."""


def policy_in(annotation: Any) -> type[Policy] | None:
    """The Policy class inside a field's type (`RunSection | None`), if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, Policy):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return next((found for arg in get_args(annotation) if (found := policy_in(arg))), None)
    return None


def _is_free(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(_is_free(arg) for arg in get_args(annotation))
    return get_origin(annotation) is dict


def walk_fields(policy: type[Policy], prefix: str = "") -> Iterator[Field]:
    """The settings of a Policy and of the Policies in it, depth first in the order of the
    source.
    """
    for name, info in policy.model_fields.items():
        path = f"{prefix}{name}"
        section = policy_in(info.annotation)
        if section is not None:
            yield from walk_fields(section, f"{path}.")
        else:
            whole = (
                Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
            )
            yield Field(path, info.description or "", _is_free(info.annotation), whole)


def _prefixes(path: str) -> Iterator[str]:
    parts = path.split(".")
    for length in range(1, len(parts)):
        yield ".".join(parts[:length])


@cache
def fields() -> dict[str, Field]:
    """Path to setting, for every setting of the schema."""
    return {field.path: field for field in walk_fields(Config)}


@cache
def values_of(path: str) -> TypeAdapter[Any]:
    """What reads a value of the setting `path`, alone."""
    return TypeAdapter(fields()[path].annotation)


@cache
def schema_sections() -> frozenset[str]:
    """Paths of the schema that hold settings."""
    return frozenset(prefix for path in fields() for prefix in _prefixes(path))


@cache
def sections() -> frozenset[str]:
    """Every path below which keys are known, of whatever origin. A free field is no section."""
    found = {prefix for path in (*fields(), *TABLE, *ALIASES) for prefix in _prefixes(path)}
    return frozenset(found - set(fields()))


@cache
def known() -> frozenset[str]:
    """Every path that a file may contain."""
    return frozenset({*fields(), *TABLE, *ALIASES} | sections())


@cache
def inside(section: str) -> tuple[str, ...]:
    """The names known in a section ("" for the top of the file), sorted."""
    start = f"{section}." if section else ""
    return tuple(
        sorted({path[len(start) :].split(".")[0] for path in known() if path.startswith(start)})
    )


_REMOVED = {
    "parallel.links": (
        "leave it out; parallel.measure_seconds measures the links at the start of a run"
    ),
    "run.history": (
        "leave it out; `plait calibrate` measures a machine, and `plait plan --calibrate FILE`"
        " takes what it wrote"
    ),
}
"""Settings of earlier versions, and what to use instead."""


def remedy_for(section: str, name: str) -> str:
    """What to do about an unknown `name` in `section`: the nearest known names, here or in another
    section, or all that is known here.
    """
    start = f"{section}." if section else ""
    if start + name in _REMOVED:
        return _REMOVED[start + name]
    near = nearest(name, inside(section))
    if near:
        return f"did you mean {' or '.join(start + found for found in near)}?"
    sections = sorted(path for path in known() if path.rpartition(".")[2] == name)
    if sections:
        return f"it belongs elsewhere: {' or '.join(sections[:3])}"
    here = inside(section)
    return (
        f"known here are {', '.join(here)}"
        if len(here) <= 40
        else "`plait config schema` lists what is known"
    )


def nearest(name: str, candidates: Iterable[str]) -> list[str]:
    """All candidates at the least edit distance from `name`, at most a third of its letters away;
    at most five.
    """
    if len(name) > _LONGEST_NAME:
        return []
    written = name.lower().replace("-", "_")
    limit = max(1, len(name) // 3)
    near = [candidate for candidate in candidates if abs(len(candidate) - len(written)) <= limit]
    measured = sorted((edit_distance(written, candidate.lower()), candidate) for candidate in near)
    return [candidate for distance, candidate in measured if distance == measured[0][0] <= limit][
        :5
    ]


def edit_distance(a: str, b: str) -> int:
    """Letters to insert, remove, replace or swap with their neighbour to turn `a` into `b` (optimal
    string alignment).
    """
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        row = [i]
        for j, y in enumerate(b, start=1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before = last
        last = row
    return last[len(b)]
