"""Index of all keys that a file may contain: the schema, the DeepSpeed table, and aliases.

The index is built once. It tells whether a dotted path is a setting or a section, which names a
section contains, and which known name a misspelt one is close to.
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

_MAX_NAME_LENGTH = 100
"""Maximum length of a name for which a similar one is searched."""
_MAX_SUGGESTIONS = 5
_MAX_LISTED = 40
"""Maximum number of known names that a message lists."""


@dataclass(frozen=True)
class SchemaField:
    """Setting of the schema."""

    path: str
    description: str
    free: bool
    """True if the value is an object whose keys the schema does not list (`model.config`,
    `optimizer.params`).
    """
    annotation: Any
    """Type of the value, including all constraints."""


def policy_in(annotation: Any) -> type[Policy] | None:
    """Return the Policy class in a field's type (`RunSection | None`), or None."""
    if isinstance(annotation, type) and issubclass(annotation, Policy):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        for argument in get_args(annotation):
            policy = policy_in(argument)
            if policy is not None:
                return policy
    return None


def _is_free(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(_is_free(argument) for argument in get_args(annotation))
    return get_origin(annotation) is dict


def walk_fields(policy: type[Policy], prefix: str = "") -> Iterator[SchemaField]:
    """Yield the settings of a Policy and of its sections, depth first in source order."""
    for name, info in policy.model_fields.items():
        path = f"{prefix}{name}"
        section = policy_in(info.annotation)
        if section is not None:
            yield from walk_fields(section, f"{path}.")
            continue

        annotation: Any = info.annotation
        if info.metadata:
            # pydantic moves constraints out of the annotation.
            annotation = Annotated[(info.annotation, *info.metadata)]
        yield SchemaField(path, info.description or "", _is_free(info.annotation), annotation)


def _parents(path: str) -> Iterator[str]:
    names = path.split(".")
    for length in range(1, len(names)):
        yield ".".join(names[:length])


@cache
def schema_fields() -> dict[str, SchemaField]:
    """Return all settings of the schema, by dotted path."""
    return {field.path: field for field in walk_fields(Config)}


@cache
def value_adapter(path: str) -> TypeAdapter[Any]:
    """Return the adapter that parses a value of the setting `path`."""
    return TypeAdapter(schema_fields()[path].annotation)


@cache
def schema_sections() -> frozenset[str]:
    """Return the paths of the schema that contain settings."""
    return frozenset(parent for path in schema_fields() for parent in _parents(path))


@cache
def sections() -> frozenset[str]:
    """Return all paths below which keys are known: of the schema, the table and the aliases."""
    parents = {parent for path in (*schema_fields(), *TABLE, *ALIASES) for parent in _parents(path)}
    # A free field has known keys in it, but it is a setting.
    return frozenset(parents - set(schema_fields()))


@cache
def known_paths() -> frozenset[str]:
    """Return all paths that a file may contain."""
    return frozenset({*schema_fields(), *TABLE, *ALIASES} | sections())


@cache
def names_in(section: str) -> tuple[str, ...]:
    """Return the known names in a section ("" for the top of the file), sorted."""
    prefix = f"{section}." if section else ""
    paths = [path.removeprefix(prefix) for path in known_paths() if path.startswith(prefix)]
    return tuple(sorted({path.split(".")[0] for path in paths}))


_REMOVED = {
    "parallel.links": (
        "leave it out; parallel.measure_seconds measures the links at the start of a run"
    ),
    "run.history": (
        "leave it out; `plait calibrate` measures a machine, and `plait plan --calibrate FILE`"
        " takes what it wrote"
    ),
}
"""Settings of earlier versions: remedy by path."""


def remedy_for(section: str, name: str) -> str:
    """Return the remedy for an unknown name in a section.

    The remedy names the most similar names in the section, else sections that contain the name,
    else all names of the section.
    """
    prefix = f"{section}." if section else ""
    if prefix + name in _REMOVED:
        return _REMOVED[prefix + name]

    matches = nearest(name, names_in(section))
    if matches:
        return f"did you mean {' or '.join(prefix + match for match in matches)}?"

    elsewhere = sorted(path for path in known_paths() if path.rpartition(".")[2] == name)
    if elsewhere:
        return f"it belongs elsewhere: {' or '.join(elsewhere[:3])}"

    names = names_in(section)
    if len(names) > _MAX_LISTED:
        return "`plait config schema` lists what is known"
    return f"known here are {', '.join(names)}"


def nearest(name: str, candidates: Iterable[str]) -> list[str]:
    """Return the candidates with the smallest edit distance from a misspelt name.

    Candidates that differ in more than a third of the letters do not count.
    """
    if len(name) > _MAX_NAME_LENGTH:
        return []
    written = name.lower().replace("-", "_")
    limit = max(1, len(name) // 3)
    # The difference of the lengths is a lower bound of the distance, and much cheaper.
    plausible = [
        candidate for candidate in candidates if abs(len(candidate) - len(written)) <= limit
    ]
    distances = sorted(
        (edit_distance(written, candidate.lower()), candidate) for candidate in plausible
    )
    if not distances or distances[0][0] > limit:
        return []
    smallest = distances[0][0]
    matches = [candidate for distance, candidate in distances if distance == smallest]
    return matches[:_MAX_SUGGESTIONS]


def edit_distance(a: str, b: str) -> int:
    """Return the optimal string alignment distance of two texts.

    It is the number of letters to insert, remove, replace or swap with their neighbour.
    """
    # Rows of the dynamic programme: row[j] is the distance of a[:i] and b[:j].
    before_last: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        row = [i]
        for j, y in enumerate(b, start=1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before_last[j - 2] + 1)
            row.append(cost)
        before_last = last
        last = row
    return last[len(b)]
