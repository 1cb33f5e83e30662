"""Every error a user can meet, in one form: the field and its value, the rule with its numbers, the
remedy.

The command prints the message of a PlaitError without a traceback and exits with its `exit_code`.
Anything else that escapes is a defect of Plait and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
import unicodedata
import warnings
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One broken rule. Printed as `field = value: rule; remedy`."""

    field: str
    value: object
    rule: str
    remedy: str

    def __str__(self) -> str:
        field = _cut(self.field) or '""'
        shown = field if self.value is None else f"{field} = {_show(self.value)}"
        return f"{shown}: {_cut(self.rule, 1500)}; {_cut(self.remedy, 1500)}"


def _show(value: object) -> str:
    return _cut(repr(value) if isinstance(value, str) else str(value), 120)


def _cut(text: str, longest: int = 400) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."


_LONGEST_MESSAGE = 10_000
"""Characters of a message. Files from others can hold names of megabytes."""


class PlaitError(Exception):
    """A mistake or a condition outside Plait, told in a sentence that a user can act on.

    The message has no control characters besides line breaks and tabs: a name in a file could
    otherwise change what a terminal shows.
    """

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str) -> str:
    """Return a text that is bounded, and whose control characters are escaped."""
    cut = (
        text
        if len(text) <= _LONGEST_MESSAGE
        else f"{text[:_LONGEST_MESSAGE]}... ({len(text):,} characters)"
    )
    if cut.isprintable():
        return cut
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) != "Cc" else ascii(char)[1:-1]
        for char in cut
    )


class ConfigError(PlaitError):
    """A configuration that cannot be run. Carries every problem found, not only the first."""

    exit_code = 2

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


def refuse(problems: Iterable[Problem]) -> None:
    """Raise ConfigError with all of them; nothing where there are none."""
    found = tuple(problems)
    if found:
        raise ConfigError(*found)


class InputError(PlaitError):
    """A file, a folder, a data set or an argument that cannot be used."""

    exit_code = 2


class ModelError(PlaitError):
    """A model that the requested configuration cannot be applied to."""

    exit_code = 2


class ParityError(PlaitError):
    """A layout computed something else than one process does."""

    exit_code = 3


class CheckpointError(PlaitError):
    """A checkpoint that is missing, incomplete or of another model."""

    exit_code = 4


class CommunicationError(PlaitError):
    """A collective that cannot complete: a rank ended, is stuck, or issues another one."""

    exit_code = 5


class DeviceError(PlaitError):
    """There is no device to do what was asked for."""

    exit_code = 6


class NumbersError(PlaitError):
    """Numbers that cannot be trained on: a loss or gradient that is not finite, or replicas that
    differ.
    """

    exit_code = 7
    of_batch = True
    """Whether they come from the batch, so that they would come again with it."""
    samples: int | None = None
    """Sequences that a run had consumed before that batch."""


def first_line(error: BaseException) -> str:
    """Return the message of another library's error in one line of bounded length.

    It is the first line, with the second one if the first ends in a colon, or the error's type if
    it has no message. Some messages are long: Transformers lists all of its classes.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return _cut(f"{lines[0]} {lines[1]}")
    return _cut(lines[0]) if lines else type(error).__name__


def half_of_a_character(text: str) -> str | None:
    """The first lone surrogate of a text, as Python writes it: JSON and command lines can have one,
    tokenizers and UTF-8 cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ascii(text[error.start])
    return None


def warn(message: str) -> None:
    """A warning at the line of the user's own code that called Plait, however deep in Plait it is
    found.
    """
    here = os.path.dirname(__file__) + os.sep
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(here) or frame.f_globals.get("__name__") == "contextlib"
    ):
        frame = frame.f_back
        level = level + 1
    warnings.warn(message, stacklevel=level)
