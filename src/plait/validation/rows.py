"""Rows of a validation and their results.

A row is one check with its settings. This module is plain data: the process that starts the checks
needs neither torch nor a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["passed", "failed", "not run"]

LIMIT_FACTOR = 3.0
"""A row is stopped after this many times its planned time."""


@dataclass(frozen=True)
class Row:
    """Check of the catalogue."""

    name: str
    """Name as `check/variant`, for `--only` and for the document."""
    title: str
    check: str
    """`module:function` below `plait.validation`, called as function(context, settings) on every
    rank.
    """
    ranks: int = 1
    planned_seconds: float = 10.0
    """Planned time on an H100. A row does not start when this time is no longer left."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    own_process: bool = False
    """True if the row needs a process of its own, because it changes the state of the process."""
    by_default: bool = True
    """True if the row runs without `--only`."""
    unavailable: str = ""
    """Reason why the row cannot run on this machine. Empty for a row that can run."""
    least_limit_seconds: float = 60.0
    """Shortest time limit. First uses of a GPU load kernels, which can take seconds."""

    @property
    def limit_seconds(self) -> float:
        """Time after which the row is stopped."""
        return max(self.least_limit_seconds, LIMIT_FACTOR * self.planned_seconds)


@dataclass(frozen=True)
class Result:
    """Result of one row. A row that did not pass always has a reason."""

    name: str
    title: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    planned_seconds: float = 0.0
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class Verdict:
    """Result of a check on its first rank."""

    outcome: Outcome
    reason: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


class NotRun(Exception):
    """The check cannot run on this machine. The message is the reason. All ranks raise it, or
    none.
    """


def verdict(problems: Sequence[str], **numbers: Any) -> Verdict:
    """Return a verdict that has passed if there are no problems, and has failed otherwise."""
    return Verdict("failed" if problems else "passed", "; ".join(problems), numbers)


def not_run(row: Row, reason: str) -> Result:
    """Return the result of a row that did not run."""
    return Result(row.name, row.title, "not run", reason, planned_seconds=row.planned_seconds)


def counts(results: Sequence[Result]) -> dict[str, int]:
    """Return the number of results of each outcome."""
    return {
        outcome: sum(result.outcome == outcome for result in results)
        for outcome in ("passed", "failed", "not run")
    }


def exit_code(results: Sequence[Result]) -> int:
    """Return 0 if at least one row passed and none failed, otherwise 1."""
    by_outcome = counts(results)
    return 1 if by_outcome["failed"] or not by_outcome["passed"] else 0
