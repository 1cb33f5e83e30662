"""Errors and warnings for users.

A message names the field and its value, the rule with its numbers, and the remedy. The command line
prints the message of a `PlaitError` without a traceback and exits with its `exit_code`. Any other
exception that escapes is a defect of Plait and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
import unicodedata
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

_MAX_MESSAGE_CHARACTERS = 10_000
"""Longest message that is printed. Foreign files can contain names of several megabytes."""


@dataclass(frozen=True)
class Problem:
    """Violation of one rule, printed as `field = value: rule; remedy`."""

    field: str
    value: object
    rule: str
    remedy: str

    def __str__(self) -> str:
        field = shorten(self.field) or '""'
        if self.value is not None:
            field = f"{field} = {_format_value(self.value)}"
        return f"{field}: {shorten(self.rule, 1500)}; {shorten(self.remedy, 1500)}"


def _format_value(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return shorten(text, 120)


def shorten(text: str, max_characters: int = 400) -> str:
    """Return a string truncated to `max_characters`, with an ellipsis if its end is cut off."""
    if len(text) <= max_characters:
        return text
    return text[: max_characters - 3] + "..."


class PlaitError(Exception):
    """User error, or a condition outside Plait, with an actionable message.

    The message contains no control characters besides line breaks and tabs. Otherwise a name in a
    file could change what a terminal shows.
    """

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str) -> str:
    """Return a string of bounded length with escaped control characters."""
    if len(text) > _MAX_MESSAGE_CHARACTERS:
        text = f"{text[:_MAX_MESSAGE_CHARACTERS]}... ({len(text):,} characters)"
    if text.isprintable():
        return text
    return "".join(_escape_control(char) for char in text)


def _escape_control(char: str) -> str:
    if char in "\n\t" or unicodedata.category(char) != "Cc":
        return char
    return ascii(char)[1:-1]


class ConfigError(PlaitError):
    """Configuration that cannot be run.

    Attributes:
        problems: All problems of the configuration, not only the first one.
    """

    exit_code = 2

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise ConfigError with all problems, if there are any."""
    collected = tuple(problems)
    if collected:
        raise ConfigError(*collected)


class InputError(PlaitError):
    """File, folder, data set or argument that cannot be used."""

    exit_code = 2


class ModelError(PlaitError):
    """Model to which the requested configuration cannot be applied."""

    exit_code = 2


class ParityError(PlaitError):
    """Difference between the results of a layout and those of a single process."""

    exit_code = 3


class CheckpointError(PlaitError):
    """Checkpoint that is missing, incomplete or written for another model."""

    exit_code = 4


class CommunicationError(PlaitError):
    """Collective that cannot complete: a rank ended, hangs, or issued another collective."""

    exit_code = 5


class DeviceError(PlaitError):
    """Missing device of the required type."""

    exit_code = 6


class NumbersError(PlaitError):
    """Non-finite loss or gradient, or replicas with different values."""

    exit_code = 7
    caused_by_batch = True
    """True if the batch is the cause. The error would then recur with the same batch."""
    samples: int | None = None
    """Number of sequences that the run had consumed before the batch."""


def first_line(error: BaseException) -> str:
    """Return another library's error message as one line of bounded length.

    The result is the first line of the message. If it ends in a colon, the second line is added. If
    there is no message, it is the type of the error. Some messages are long: Transformers lists all
    of its classes.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if len(lines) > 1 and lines[0].endswith(":"):
        return shorten(f"{lines[0]} {lines[1]}")
    return shorten(lines[0])


def first_lone_surrogate(text: str) -> str | None:
    """Return the first lone surrogate of a string in the notation of Python, or None.

    JSON and command lines can contain lone surrogates; tokenizers and UTF-8 cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ascii(text[error.start])
    return None


def warn(message: str) -> None:
    """Issue a warning at the line of user code that called Plait."""
    package = os.path.dirname(__file__) + os.sep
    frame = sys._getframe(1)
    stack_level = 2
    # A context manager of Plait is entered by a frame of contextlib.
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(package)
        or frame.f_globals.get("__name__") == "contextlib"
    ):
        frame = frame.f_back
        stack_level += 1
    warnings.warn(message, stacklevel=stack_level)
