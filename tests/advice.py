"""Mistakes, their error messages, and programs that follow the remedy of the message."""

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
        texts: Parts of the message, such as its rule and its remedy.
        mistake: Function that raises.
        remedy: Function that does what the message says. It returns False if that had no effect.
    """

    texts: tuple[str, ...]
    mistake: Callable[[], Any]
    remedy: Callable[[], Any]


def failures(table):
    """Return the messages that are not raised, and the remedies that fail."""
    problems = []
    for case in table:
        name = case.texts[0]
        try:
            case.mistake()
            problems.append(f"{name}: nothing was raised")
        except PlaitError as error:
            message = str(error)
            problems += [f"{text!r} not in: {error}" for text in case.texts if text not in message]
        except Exception:
            problems.append(f"{name}: another error: {traceback.format_exc(limit=-3)}")

        try:
            if case.remedy() is False:
                problems.append(f"{name}: the remedy has no effect")
        except Exception:
            problems.append(f"{name}: {traceback.format_exc(limit=-3)}")
    return problems


def check(rows):
    """Fail with all failures of a table."""
    problems = failures(rows)
    assert not problems, "\n".join(problems)


def each(function, *values):
    """Return a function that calls another with each value, for a remedy with alternatives."""

    def call():
        return all(function(value) is not False for value in values)

    return call


def table(text, call):
    """Return the cases of lines `mistake -> message -> remedy | remedy`.

    `call` receives the mistake and the remedies as texts.
    """
    rows = []
    for line in text.strip().splitlines():
        mistake, message, remedies = line.strip().split(" -> ")
        rows.append(Case((message,), partial(call, mistake), each(call, *remedies.split(" | "))))
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
    """Return a function that runs `plait` with a line of arguments and raises its error message.

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
