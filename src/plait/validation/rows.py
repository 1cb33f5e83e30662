"""Rows of a validation and their results. Pure data: the command that starts them needs neither torch nor a GPU.

A row is one check with its settings; rows with as many ranks run one after another in the same processes, unless one wants its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["passed", "failed", "not run"]


@dataclass(frozen=True)
class Row:
    """One check."""

    name: str
    """`check/what`, as `--only` and the document name it."""
    title: str
    check: str
    """`module:function` of `plait.validation`, called with (context, settings) in every rank."""
    ranks: int = 1
    seconds: float = 60.0
    """It is ended after so long."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    apart: bool = False
    """In processes of its own: it needs the device to itself, or leaves it in a state that no other check should find."""
    without: str = ""
    """Why it cannot run here; empty where it can."""


@dataclass(frozen=True)
class Result:
    """What came of a row. `numbers` are plain values; `reason` is never empty but where the row passed."""

    name: str
    title: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Found:
    """What a check returns on its first rank."""

    outcome: Outcome
    reason: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


class NotRun(Exception):
    """The check cannot run here; the message is the reason. Raised on every rank or on none."""


def passed(**numbers: Any) -> Found:
    """The check held, with what it measured."""
    return Found("passed", "", numbers)


def compared(problems: Sequence[str], **numbers: Any) -> Found:
    """Failed with these problems, passed where there are none."""
    return Found("failed" if problems else "passed", "; ".join(problems), numbers)


def not_run(row: Row, reason: str) -> Result:
    """A row that did not run."""
    return Result(row.name, row.title, "not run", reason)


def counts(results: Sequence[Result]) -> dict[str, int]:
    """How many results of each kind."""
    return {outcome: sum(one.outcome == outcome for one in results) for outcome in ("passed", "failed", "not run")}


def exit_code(results: Sequence[Result]) -> int:
    """0 where something passed and nothing failed; a validation of which nothing ran shows nothing, and is 1 too."""
    found = counts(results)
    return 1 if found["failed"] or not found["passed"] else 0
