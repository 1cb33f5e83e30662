"""A validation on the screen: a bar and a line per row on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from plait.units import format_bytes
from plait.validation.catalogue import FACTS_PLANNED_SECONDS, planned_seconds
from plait.validation.rows import Result, Row, counts
from plait.validation.runner import LAUNCH_PLANNED_SECONDS, batches
from plait.validation.summary import summary_of

_COLOURS = {"passed": "green", "failed": "red", "not run": "yellow"}


class Screen:
    """Shows rows as they begin and end.

    With `quiet`, lines go to standard error, because standard output is the JSON document.
    """

    def __init__(self, rows: int, facts: Mapping[str, Any], gpus: int, *, quiet: bool) -> None:
        """Show the machine. `rows` is the number of rows to come."""
        self._console = Console(stderr=quiet, soft_wrap=True, highlight=False)
        self._stream = sys.stderr if quiet else sys.stdout
        self._rows = rows
        self._ended = 0
        self._bar: Progress | None = None
        self._print(_machine_line(facts, gpus))

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("starting", total=self._rows)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def plan(self, seconds: float, minutes: float) -> None:
        """Show the planned time and the budget."""
        self._print(
            f"{self._rows} rows, planned for {seconds:.0f} s on an H100, budget {minutes:g} minutes"
        )

    def began(self, row: Row) -> None:
        """Show the title of the row that runs, on a terminal."""
        if self._bar is not None:
            self._bar.update(self._task, description=row.title)

    def ended(self, result: Result) -> None:
        """Show the result of a row."""
        self._ended += 1
        note = result.reason or summary_of(result.name, result.numbers)
        line = f"{result.outcome:<8} {result.name:<26} {result.seconds:6.1f} s  {result.title}"
        if note:
            line += f": {note}"
        if self._bar is None:
            self._print(line)
            return
        self._bar.update(self._task, completed=self._ended)
        self._bar.console.print(line, style=_COLOURS[result.outcome], markup=False)

    def summary(self, results: Sequence[Result], out: Path, seconds: float) -> None:
        """Show the counts and the place of the document."""
        number = counts(results)
        self._print(
            f"\n{number['passed']} passed, {number['failed']} failed, {number['not run']} not run"
            f" in {seconds:.0f} s"
        )
        self._print(f"{out} has the numbers; docs/how-to/gpus.md says where to send it")

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def table_of_rows(rows: Sequence[Row], gpus: int) -> str:
    """Return the planned seconds of rows and their sum, as lines of text."""
    launches = sum(any(not row.unavailable for row in batch) for batch in batches(rows))
    start = f"  {FACTS_PLANNED_SECONDS:5.0f} s  versions and devices"
    launch = f"  {launches * LAUNCH_PLANNED_SECONDS:5.0f} s  start of {launches} launches"
    lines = ["planned seconds on an H100, the most valuable rows first", start, launch]
    for row in rows:
        planned = "      -" if row.unavailable else f"  {row.planned_seconds:5.0f} s"
        note = f" (not run: {row.unavailable})" if row.unavailable else ""
        lines.append(f"{planned}  {row.name:<26} {row.title}{note}")
    lines.append(
        f"  {planned_seconds(rows):5.0f} s  in all, with {gpus} GPU{'s' if gpus > 1 else ''}"
    )
    return "\n".join(lines)


def _machine_line(facts: Mapping[str, Any], gpus: int) -> str:
    devices = facts["devices"]
    kinds = [
        f"{device['name']}, {format_bytes(device['memory_bytes'])}" for device in devices[:gpus]
    ]
    versions = facts["versions"]
    driver = f", driver {facts['driver']}" if facts["driver"] else ""
    return (
        f"{gpus} of {len(devices)} GPUs ({', '.join(dict.fromkeys(kinds))}){driver}, "
        f"torch {versions.get('torch')}, plait {versions.get('plait')}"
    )
