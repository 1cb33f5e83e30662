"""Where a configuration came from: the keys of its file as they were written, with what each means
here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """What a key of a file means to Plait."""

    SUPPORTED = "supported"
    RENAMED = "renamed"
    IGNORED = "ignored"
    REFUSED = "refused"
    COMMENT = "comment"


@dataclass(frozen=True)
class Row:
    """One key of a file: what was written and what it means."""

    key: str
    """As written."""
    value: Any
    status: Status
    meaning: str
    path: str = ""
    """The key under the name that the schema or the table has for it."""


@dataclass(frozen=True)
class Provenance:
    """Where a configuration came from."""

    name: str = "the configuration"
    """The file, or what was given instead of one."""
    deepspeed: bool | None = None
    """A DeepSpeed file: no section of Plait's in it. None: not read from anything."""
    rows: tuple[Row, ...] = ()
    """Every key, in the order of the file."""
    origins: dict[str, str] = field(default_factory=dict)
    """Path of a field that was given -> "file", "override", "file: tensor_parallel.tp_size"."""

    def warning(self) -> str | None:
        """One sentence about the ignored keys, for the user; None where there are none."""
        names = [row.key for row in self.rows if row.status is Status.IGNORED]
        if not names:
            return None
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return f"{self.name}: ignored are {shown}; `plait config explain` has the reasons"
