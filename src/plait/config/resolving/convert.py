"""A file or a command line of another program as a file of Plait's, with a row for every key: what it became, or why it became nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait.config.dialects.examine import at_path
from plait.config.reading.source import Source
from plait.config.resolving.resolve import finish, look
from plait.config.schema.provenance import Row, Status
from plait.errors import ConfigError, Problem


@dataclass(frozen=True)
class Conversion:
    """What became of a configuration."""

    name: str
    """The file, or what was given instead of one."""
    tree: dict[str, Any]
    """The same under the schema's names. `load` makes the same Config of it."""
    keys: tuple[Row, ...]
    """One row a key of theirs, and one for each default of the other program that was written out."""
    problems: tuple[Problem, ...]
    """What keeps the tree from being used."""


def convert(source: Source, overrides: Sequence[str] = ()) -> Conversion:
    """Translate `source`. Raises ConfigError only where there are no keys to show (no such file, no JSON)."""
    document, found = look(source, overrides)
    try:
        finish(document, found)
        problems: tuple[Problem, ...] = ()
    except ConfigError as error:
        problems = error.problems
    defaults = [(path, origin) for path, origin in found.origins.items() if origin.endswith("'s default")]
    left_out = [Row("(left out)", at_path(found.tree, path), Status.RENAMED, origin, path) for path, origin in defaults]
    return Conversion(document.name, found.tree, (*found.rows, *left_out), problems)
