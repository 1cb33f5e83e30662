"""A validation on the screen: a bar and a line a row on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from plait.units import format_bytes
from plait.validation.rows import Result, Row, counts

_COLOURS = {"passed": "green", "failed": "red", "not run": "yellow"}


class Shown:
    """Told when a row begins and when it has ended. With `quiet` lines go to standard error, because standard output is JSON."""

    def __init__(self, rows: int, facts: Mapping[str, Any], gpus: int, *, quiet: bool) -> None:
        self._console = Console(stderr=quiet, soft_wrap=True, highlight=False)
        self._stream = sys.stderr if quiet else sys.stdout
        self._rows, self._done = rows, 0
        self._bar: Progress | None = None
        self._say(_machine(facts, gpus))

    def __enter__(self) -> Shown:
        if self._console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("starting", total=self._rows)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def began(self, row: Row) -> None:
        """Shown where there is a bar."""
        if self._bar is not None:
            self._bar.update(self._task, description=row.title)

    def ended(self, result: Result) -> None:
        """A line."""
        self._done += 1
        line = f"{result.outcome:<8} {result.name:<32} {result.seconds:6.1f} s  {result.title}"
        note = result.reason or remark(result.numbers)
        if self._bar is None:
            self._say(line + (f": {note}" if note else ""))
            return
        self._bar.update(self._task, completed=self._done)
        self._bar.console.print(line + (f": {note}" if note else ""), style=_COLOURS[result.outcome], markup=False)

    def summary(self, results: Sequence[Result], out: Path, seconds: float) -> None:
        """The counts, and where the document is."""
        found = counts(results)
        self._say(f"\n{found['passed']} passed, {found['failed']} failed, {found['not run']} not run in {seconds:.0f} s")
        self._say(f"{out} holds the numbers; docs/gpus.md says where to send it")

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def remark(numbers: Mapping[str, Any]) -> str:
    """The number that tells most of a row."""
    if "ratio" in numbers:
        return f"ratio {numbers['ratio']:.2f}"
    if "configured" in numbers:
        exact, rounded = numbers["float64"]["largest_error"], numbers["configured"]["largest_share_of_allowed"]
        return f"error in float64 {exact:.0e}; {numbers['computes_in']}: {rounded:.0%} of what is allowed"
    return ""


def _machine(facts: Mapping[str, Any], gpus: int) -> str:
    devices = facts["devices"]
    names = ", ".join(dict.fromkeys(f"{device['name']}, {format_bytes(device['memory_bytes'])}" for device in devices[:gpus]))
    versions = facts["versions"]
    driver = f", driver {facts['driver']}" if facts["driver"] else ""
    return f"{gpus} of {len(devices)} GPUs ({names}){driver}, torch {versions.get('torch')}, plait {versions.get('plait')}"
