"""Runs rows in processes of their own, so that none can take the command down: a row that raises, hangs or ends its process has failed, and
the others go on.

Rows that need as many ranks share a launch. Its first rank writes a line of JSON when a row begins and when it has ended; whatever the
processes do, those lines are what is believed. After a row that ended badly the rest of them starts anew. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plait.validation.rows import Result, Row, not_run

ROWS, EVENTS, ERRORS = "rows.json", "events.jsonl", "errors.txt"
MOST_ROWS = 12
"""Of one launch: torch and its groups do not release everything."""
START_SECONDS = 180.0
"""Until the first row of a launch begins: processes start, torch is imported, contexts and communicators are made."""
LEAST_SECONDS = 15.0
"""With less of the budget left no launch is begun."""
GRACE_SECONDS = 8.0
_POLL = 0.05
_WARNING = re.compile(r"\[(rank\d+\]:\[)?W\d+ ")
"""Of torch's C++ code, which says nothing of why a process ended."""
_LINES = 6
"""Of what a failed launch printed, the last ones are in the reason."""

Command = Callable[[int, Path], Sequence[str]]
"""(ranks, folder) to the command that starts them."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; every row has its result all the same."""


class Runner:
    """Runs rows within a budget."""

    def __init__(self, command: Command, *, budget_seconds: float, began: Callable[[Row], None] = lambda _: None) -> None:
        """`began` is called with a row when it begins."""
        self._command, self._began = command, began
        self._budget = budget_seconds
        self._ends = time.monotonic() + budget_seconds

    def run(self, rows: Sequence[Row], facts: Mapping[str, Any]) -> Iterator[Result]:
        """The result of every row, in order. `facts` are given to the ranks. Raises Interrupted after the last result."""
        batches = batched(rows)
        interrupted = False
        for batch in batches:
            todo = list(batch)
            while todo:
                if todo[0].without or interrupted:
                    yield not_run(todo[0], todo[0].without or "interrupted")
                    todo.pop(0)
                elif self._left() < LEAST_SECONDS:
                    yield not_run(todo.pop(0), self._used_up())
                else:
                    try:
                        results = self._launch(todo, facts)
                    except KeyboardInterrupt as stop:
                        results, interrupted = stop.args[0], True
                    yield from results
                    del todo[: len(results)]
        if interrupted:
            raise Interrupted

    def _left(self) -> float:
        return self._ends - time.monotonic()

    def _used_up(self) -> str:
        return f"the budget of {self._budget / 60:g} minutes was used up"

    def _launch(self, rows: list[Row], facts: Mapping[str, Any]) -> list[Result]:
        """Results of the first rows, at least one; of all where nothing ended badly. KeyboardInterrupt carries those that there are."""
        with tempfile.TemporaryDirectory(prefix="plait-validate-") as name:
            folder = Path(name)
            (folder / ROWS).write_text(json.dumps({"facts": dict(facts), "rows": [asdict(row) for row in rows]}))
            with (folder / ERRORS).open("wb") as errors:
                process = subprocess.Popen(
                    self._command(rows[0].ranks, folder),
                    stdin=subprocess.PIPE,  # closed when this process ends, however it does: the launcher follows
                    stdout=errors,
                    stderr=errors,
                    start_new_session=True,  # Ctrl-C is this process's to handle
                )
            watch = _Watch(rows, folder / EVENTS, self._began)
            try:
                reason = self._watch(process, watch)
            except KeyboardInterrupt:
                end(process)
                watch.read()
                raise KeyboardInterrupt([*watch.results, *watch.unfinished("not run", "interrupted")]) from None
            if reason is None:  # every row has its result, or the processes have ended
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_SECONDS)
            end(process)
            watch.read()
            if not watch.remaining:
                return watch.results
            if reason is None:
                said = _last_lines(folder / ERRORS)
                reason = f"its processes ended with exit code {process.returncode}" + (f": {said}" if said else "")
                return [*watch.results, *watch.unfinished("failed", reason)]
            return [*watch.results, *watch.unfinished(*reason)]

    def _watch(self, process: subprocess.Popen[bytes], watch: _Watch) -> Any:
        """Until the launch ends: None; else (outcome, reason) of the row that was to be ended."""
        while True:
            ended = process.poll() is not None
            watch.read()
            if ended or not watch.remaining:
                return None
            if self._left() <= 0:
                return "not run", f"{self._used_up()} while it ran"
            late = watch.late()
            if late:
                return "failed", late
            time.sleep(_POLL)


class _Watch:
    """What the first rank has written of its rows."""

    def __init__(self, rows: Sequence[Row], events: Path, began: Callable[[Row], None]) -> None:
        self.results: list[Result] = []
        self.remaining = list(rows)
        self._events, self._tell = events, began
        self._offset = 0
        self._since = time.monotonic()
        self._running = False

    def read(self) -> None:
        """Take in new lines; the last may be written only in part."""
        if not self._events.exists():
            return
        with self._events.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            self._take(json.loads(line))

    def _take(self, event: Mapping[str, Any]) -> None:
        row = self.remaining[0]
        assert event["row"] == row.name, f"{event} while {row.name} was to come"
        if event["event"] == "began":
            self._running, self._since = True, time.monotonic()
            self._tell(row)
            return
        self.remaining.pop(0)
        self._running, seconds = False, time.monotonic() - self._since
        self._since = time.monotonic()
        self.results.append(Result(row.name, row.title, event["outcome"], event["reason"], seconds, event["numbers"]))

    def late(self) -> str:
        """Why the row must be ended; empty where it may go on."""
        limit = self.remaining[0].seconds if self._running else START_SECONDS
        if time.monotonic() - self._since <= limit:
            return ""
        return f"ran for more than {limit:.0f} s and was ended" if self._running else f"its processes did not start within {limit:.0f} s"

    def unfinished(self, outcome: Any, reason: str) -> list[Result]:
        """The result of the row that was to end next."""
        if not self.remaining:
            return []
        row = self.remaining.pop(0)
        seconds = time.monotonic() - self._since if self._running else 0.0
        return [Result(row.name, row.title, outcome, reason, seconds)]


def batched(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that follow each other and may share a launch."""
    batches: list[list[Row]] = []
    for row in rows:
        last = batches[-1] if batches else []
        alike = bool(last) and not (row.apart or last[0].apart) and row.ranks == last[0].ranks and not (row.without or last[0].without)
        if alike and len(last) < MOST_ROWS:
            last.append(row)
        else:
            batches.append([row])
    return batches


def end(process: subprocess.Popen[bytes]) -> None:
    """End a launch and its ranks: asked first, then killed. The kernel kills ranks whose launcher is gone."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)


def _last_lines(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if not _WARNING.match(line)]
    return " | ".join(told[-_LINES:])[-2000:]
