"""Mistakes, what is said about them, and programs that do what the message says."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plait.errors import PlaitError


@dataclass(frozen=True)
class Case:
    """A mistake and its remedy.

    Attributes:
        words: Text of the message, from the rule to the remedy.
        mistake: Function that raises.
        remedy: Function that does what the message says. It returns False if that had no effect.
    """

    words: tuple[str, ...]
    mistake: Callable[[], Any]
    remedy: Callable[[], Any]


def failures(table):
    """Messages that are not raised, and remedies that fail."""
    found = []
    for case in table:
        try:
            case.mistake()
            found.append(f"{case.words[0]}: nothing was raised")
        except PlaitError as error:
            found += [
                f"{words!r} not in: {error}" for words in case.words if words not in str(error)
            ]
        try:
            if case.remedy() is False:
                found.append(f"{case.words[0]}: the remedy has no effect")
        except Exception:
            found.append(f"{case.words[0]}: {traceback.format_exc(limit=-3)}")
    return found


def each(function, *values):
    """A function that calls another with each of several values, for a remedy with alternatives."""

    def call():
        return all(function(value) is not False for value in values)

    return call
