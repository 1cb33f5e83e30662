"""Provenance of a configuration: the keys of its file as they were written, and their meaning."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from plait.names import listed_names

_SHOWN_KEYS = 4
"""Number of ignored keys that a warning names."""


class Status(StrEnum):
    """Treatment of a key of a file."""

    SUPPORTED = "supported"
    RENAMED = "renamed"
    IGNORED = "ignored"
    REFUSED = "refused"
    COMMENT = "comment"


@dataclass(frozen=True)
class KeyReport:
    """Key of a file, with its value and its meaning to Plait."""

    key: str
    """Dotted path as written in the file."""
    value: Any
    status: Status
    meaning: str
    path: str = ""
    """Dotted path under the name of the schema or of the table of DeepSpeed's keys."""


@dataclass(frozen=True)
class Provenance:
    """Origin of a configuration."""

    name: str = "the configuration"
    """Path of the file, or a phrase for a configuration that was not read from a file."""
    deepspeed: bool | None = None
    """True if the file has no section of Plait's. None for a Config built in Python."""
    rows: tuple[KeyReport, ...] = ()
    """All keys, in the order of the file."""
    origins: dict[str, str] = field(default_factory=dict)
    """Origin of each field that was set, by path: "file", "override", "file: OTHER_NAME"."""

    def warning(self) -> str | None:
        """Return a warning about the ignored keys, or None if there are none."""
        ignored = [row.key for row in self.rows if row.status is Status.IGNORED]
        if not ignored:
            return None
        names = listed_names(ignored, _SHOWN_KEYS)
        return f"{self.name}: ignored are {names}; `plait config explain` has the reasons"
