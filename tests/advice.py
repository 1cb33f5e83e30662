"""Mistakes, what is said about them, and programs that do what the message says."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import yaml

from plait.cli.main import main
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
        except Exception:
            found.append(f"{case.words[0]}: another error: {traceback.format_exc(limit=-3)}")
        try:
            if case.remedy() is False:
                found.append(f"{case.words[0]}: the remedy has no effect")
        except Exception:
            found.append(f"{case.words[0]}: {traceback.format_exc(limit=-3)}")
    return found


def check(rows):
    """Fail with all failures of a table."""
    found = failures(rows)
    assert not found, "\n".join(found)


def each(function, *values):
    """A function that calls another with each of several values, for a remedy with alternatives."""

    def call():
        return all(function(value) is not False for value in values)

    return call


def table(text, call):
    """Cases of lines `mistake -> words -> remedy | remedy`, which `call` receives as texts."""
    rows = []
    for line in text.strip().splitlines():
        mistake, words, remedies = line.strip().split(" -> ")
        rows.append(Case((words,), partial(call, mistake), each(call, *remedies.split(" | "))))
    return rows


def read_table(path, name, call):
    """Return the cases of a table with `mistake`, `message` and `remedies` in a YAML file.

    Args:
        path: The file.
        name: Name of the table.
        call: Receives the text of a mistake or of a remedy.
    """
    cases = []
    for row in yaml.safe_load(path.read_text("utf-8"))[name]:
        remedy = each(call, *row["remedies"])
        cases.append(Case((row["message"],), partial(call, row["mistake"]), remedy))
    return cases


def command(capsys):
    """A function that runs `plait` with a line of arguments, and raises the message of a refusal.

    A line that has succeeded is not run again.
    """
    succeeded = set()

    def run(line):
        if line in succeeded:
            return
        with pytest.raises(SystemExit) as caught:
            main(line.split())
        output = capsys.readouterr()
        if caught.value.code:
            raise PlaitError(output.err)
        succeeded.add(line)

    return run
