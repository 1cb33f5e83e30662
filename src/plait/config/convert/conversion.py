"""Conversion of another program's configuration, with a row per key.

A row says which settings a key becomes, or why it has no equivalent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.config.convert import accelerate, fsdp, megatron
from plait.config.convert.translated import TranslatedDocument
from plait.config.dialects.examine import ExaminedDocument, examine, value_at
from plait.config.dialects.foreign import is_accelerate, is_trainer_fsdp
from plait.config.resolving.resolve import build_config
from plait.config.schema.config import Config, KeyReport, Status
from plait.config.source import Document, Source, parse_override, read
from plait.errors import ConfigError, Problem

ForeignSource = Source | Sequence[str]
"""Path of a file, its content, or a list of Megatron-LM's flags."""


@dataclass(frozen=True)
class Conversion:
    """Converted configuration, with a row per key and the problems."""

    name: str
    """Path of the file, or a phrase if there is none."""
    tree: dict[str, Any]
    """Settings under the names of the schema. `load` returns the same Config for them."""
    keys: tuple[KeyReport, ...]
    """Rows of the other program's keys, and of its defaults that were written explicitly."""
    problems: tuple[Problem, ...]
    """Problems because of which the tree cannot be used."""


def convert(source: ForeignSource, overrides: Sequence[str] = ()) -> Conversion:
    """Convert a configuration.

    Raises:
        ConfigError: There are no keys to convert (no such file, invalid JSON). Other problems are
            part of the result.
    """
    document, examined = _examine_source(source, overrides)
    try:
        # Only for its problems: the result is the tree.
        build_config(document, examined)
        problems: tuple[Problem, ...] = ()
    except ConfigError as error:
        problems = error.problems

    defaults = []
    for path, origin in examined.origins.items():
        if origin.endswith("'s default"):
            defaults.append(
                KeyReport("(left out)", value_at(examined.tree, path), Status.RENAMED, origin, path)
            )
    return Conversion(document.name, examined.tree, (*examined.rows, *defaults), problems)


def load_foreign(source: ForeignSource, overrides: Sequence[str] = ()) -> Config:
    """Return the Config that a source describes. Its provenance names the other program's keys.

    Raises:
        ConfigError: The source is invalid. The error lists all problems.
    """
    return build_config(*_examine_source(source, overrides))


def _examine_source(
    source: ForeignSource, overrides: Sequence[str]
) -> tuple[Document, ExaminedDocument]:
    """Translate every key, and collect problems.

    Raises:
        ConfigError: There are no keys, or an override is malformed.
    """
    if isinstance(source, str | Path | Mapping):
        document = _translate(read(source))
    else:
        document = megatron.read_flags(source)
    examined = examine(document, [parse_override(text) for text in overrides])
    if isinstance(document, TranslatedDocument):
        _restore_names(document, examined)
    return document, examined


def _translate(document: Document) -> Document:
    """Translate a file of Accelerate or the Trainer into Plait's keys. Return others unchanged."""
    if is_accelerate(document.tree):
        return accelerate.translate(document)
    if is_trainer_fsdp(document.tree):
        return fsdp.translate(document)
    return document


def _restore_names(document: TranslatedDocument, examined: ExaminedDocument) -> None:
    """Name the other program's keys, not Plait's, in the rows, problems and origins."""
    translated = (*document.written, *document.defaults)
    # `examine` has a row per translated setting. The other program's keys have their own rows.
    other_rows = [row for row in examined.rows if row.key not in translated]
    examined.rows[:] = [*document.rows, *other_rows]
    # Problems of translation come first: they can be the cause of the others.
    examined.problems[:0] = document.problems

    for path, origin in examined.origins.items():
        key = document.written.get(path)
        if key is not None and origin == "file":
            examined.written[path] = key
            examined.origins[path] = f"{document.noun}: {key}"
        # `examine` takes every origin for a file.
        elif document.noun != "file":
            examined.origins[path] = origin.replace("file", f"{document.noun}s")
    for path in document.defaults:
        # An override may have replaced the default.
        if value_at(examined.tree, path) == value_at(document.tree, path):
            examined.origins[path] = f"{document.program}'s default"
