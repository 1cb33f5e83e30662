"""A request on its way through the scheduler, and what its client is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event

from plait.inference.requests import Request
from plait.inference.settings import Settings


@dataclass(frozen=True)
class Told:
    """A token, or the end."""

    token: int | None = None
    finish_reason: str = ""
    """`stop` or `length` with the last token."""
    error: str = ""
    """Of a job that failed; nothing follows."""


@dataclass(eq=False)
class Job:
    """One prompt. `tell` is called on the scheduler's thread."""

    request: Request
    settings: Settings
    tell: Callable[[Told], None]
    _cancelled: Event = field(default_factory=Event)

    @property
    def tokens(self) -> int:
        """At most, with the prompt."""
        return len(self.request.token_ids) + self.request.new_tokens

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Nobody waits for it; from any thread."""
        self._cancelled.set()
