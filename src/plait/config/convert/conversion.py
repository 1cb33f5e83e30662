"""A file or a command line of another program as a file of Plait's, with a row for every key: what
it became, or why it became nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.config.convert import accelerate, megatron, trainer_fsdp
from plait.config.convert.translated import Translated
from plait.config.dialects.examine import Examined, at_path, examine
from plait.config.dialects.foreign import is_accelerate, is_trainer_fsdp
from plait.config.reading.source import Document, Source, parse_override, read
from plait.config.resolving.resolve import finish
from plait.config.schema.config import Config
from plait.config.schema.provenance import Row, Status
from plait.errors import ConfigError, Problem

ForeignSource = Source | Sequence[str]
"""A file, its content, or a list of Megatron-LM's flags."""


@dataclass(frozen=True)
class Conversion:
    """What became of a configuration."""

    name: str
    """The file, or what was given instead of one."""
    tree: dict[str, Any]
    """The same under the schema's names. `load` makes the same Config of it."""
    keys: tuple[Row, ...]
    """One row a key of theirs, and one for each default of the other program that was written out.
    """
    problems: tuple[Problem, ...]
    """What keeps the tree from being used."""


def convert(source: ForeignSource, overrides: Sequence[str] = ()) -> Conversion:
    """Translate `source`. Raises ConfigError only where there are no keys to show (no such file, no
    JSON).
    """
    document, found = _look(source, overrides)
    try:
        finish(document, found)
        problems: tuple[Problem, ...] = ()
    except ConfigError as error:
        problems = error.problems
    defaults = [
        (path, origin) for path, origin in found.origins.items() if origin.endswith("'s default")
    ]
    left_out = [
        Row("(left out)", at_path(found.tree, path), Status.RENAMED, origin, path)
        for path, origin in defaults
    ]
    return Conversion(document.name, found.tree, (*found.rows, *left_out), problems)


def load_foreign(source: ForeignSource, overrides: Sequence[str] = ()) -> Config:
    """Return the Config that `source` describes, whose provenance names the keys of the other
    program.

    Raises ConfigError with every problem.
    """
    return finish(*_look(source, overrides))


def _look(source: ForeignSource, overrides: Sequence[str]) -> tuple[Document, Examined]:
    """Look up every key, and collect problems. Raises ConfigError if there are no keys, and for a
    malformed override.
    """
    if isinstance(source, str | Path | Mapping):
        document = _translated(read(source))
    else:
        document = megatron.read_flags(source)
    found = examine(document, [parse_override(text) for text in overrides])
    if isinstance(document, Translated):
        _describe(document, found)
    return document, found


def _translated(document: Document) -> Document:
    """Return a file of Accelerate or of the Trainer as what it means, and other files unchanged."""
    if is_accelerate(document.tree):
        return accelerate.translate(document)
    return trainer_fsdp.translate(document) if is_trainer_fsdp(document.tree) else document


def _describe(document: Translated, found: Examined) -> None:
    """Make `found` name the keys of the other program instead of those that they became."""
    translated = (*document.written, *document.defaults)
    found.deepspeed = False
    found.rows[:] = [*document.rows, *(row for row in found.rows if row.key not in translated)]
    found.problems[:0] = document.problems
    for path, origin in found.origins.items():
        key = document.written.get(path)
        if key is not None and origin == "file":
            found.written[path], found.origins[path] = key, f"{document.noun}: {key}"
        elif document.noun != "file":
            found.origins[path] = origin.replace("file", f"{document.noun}s")
    for path in document.defaults:
        if at_path(found.tree, path) == at_path(document.tree, path):
            found.origins[path] = f"{document.program}'s default"
