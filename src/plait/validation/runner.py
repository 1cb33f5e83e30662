"""Runner of validation rows in separate processes, within a time budget.

Note [Turns]
    Rows that need the same number of ranks share one launch of processes. The parent process
    chooses the next row when the previous one has ended, because only then does it know how much
    time is left. It appends the row's index to a file (TURNS) that all ranks read, so all ranks run
    the same row. The first rank appends progress and results to another file (EVENTS). Files remain
    after a crash: the parent then knows which row was running, reports this row as failed with its
    partial measurements, and starts a new launch with the remaining rows.

Note [Which rows run]
    Rows are listed by value, the most valuable first. A row starts if the remaining time covers its
    planned time and that of all more valuable rows that have yet to run. (More valuable rows may
    run later, because they need another number of ranks.) Rows of low value are therefore skipped
    first.
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

from plait.validation.rows import Outcome, Result, Row, not_run

ROWS = "rows.json"
TURNS = "turns.txt"
EVENTS = "events.jsonl"
ERRORS = "errors.txt"
END_TURN = "end"
"""Line of TURNS after which the processes end."""
LAUNCH_PLANNED_SECONDS = 20.0
"""Planned time until the first row of a launch begins: imports, CUDA context, process group."""
LAUNCH_LIMIT_SECONDS = 180.0
"""Time after which a launch whose first row has not begun is stopped."""
GRACE_SECONDS = 8.0
_POLL_SECONDS = 0.05
_WARNING = re.compile(r"\[(rank\d+\]:\[)?W\d+ ")
"""Warnings of torch's C++ code. They do not explain why a process ended."""
_REPORTED_LINES = 6
"""Number of lines from a failed launch's output that become the reason."""

LaunchCommand = Callable[[int, Path], Sequence[str]]
"""Function from (ranks, folder) to the command line that starts these ranks."""


class Interrupted(KeyboardInterrupt):
    """Raised after a validation was interrupted by Ctrl-C and every row has a result."""


class Runner:
    """Runs validation rows within a time budget. See Note [Turns] and Note [Which rows run]."""

    def __init__(
        self,
        command: LaunchCommand,
        *,
        budget_seconds: float,
        began: Callable[[Row], None] = lambda row: None,
    ) -> None:
        """Create a runner. The time budget starts now.

        Args:
            command: Returns the command line of a launch.
            budget_seconds: Seconds after which all rows must have ended.
            began: Progress callback. Receives each row that starts.
        """
        self.command = command
        self.began = began
        self.budget_seconds = budget_seconds
        self._deadline = time.monotonic() + budget_seconds

    def run(self, rows: Sequence[Row], facts: Mapping[str, Any]) -> Iterator[Result]:
        """Yield the result of each row when it has ended.

        Args:
            rows: Rows in the order of their value.
            facts: Description of the machine, which is passed to the processes.

        Raises:
            Interrupted: Ctrl-C was pressed. The error is raised after the last result.
        """
        # Rows in the order in which they run, which differs from the order of their value.
        order = [row for batch in batches(rows) for row in batch]
        interrupted = False
        for batch in batches(rows):
            pending = list(batch)
            while pending:
                later = order[order.index(pending[-1]) + 1 :]
                # A row that has no time left must not cost a launch.
                skipped = self.skip(pending, rows, later, interrupted=interrupted, launching=True)
                yield from skipped
                if not pending:
                    break
                # A launch that ends early leaves rows in `pending`, which the next one runs.
                launch = _Launch(self, pending, rows, later, facts)
                try:
                    yield from launch.results()
                except KeyboardInterrupt:
                    interrupted = True
                    yield from launch.unfinished("not run", "interrupted")
        if interrupted:
            raise Interrupted

    def seconds_left(self) -> float:
        """Return the remaining budget in seconds."""
        return self._deadline - time.monotonic()

    def skip(
        self,
        pending: list[Row],
        rows: Sequence[Row],
        later: Sequence[Row],
        *,
        interrupted: bool = False,
        launching: bool = False,
    ) -> list[Result]:
        """Remove rows from the front of `pending` until a row can start.

        Returns:
            Results of the removed rows, with the reasons why they did not run.
        """
        skipped = []
        while pending:
            row = pending[0]
            reason = "interrupted" if interrupted else row.unavailable
            reason = reason or self._no_time_for(row, rows, later, launching=launching)
            if not reason:
                break
            skipped.append(not_run(pending.pop(0), reason))
        return skipped

    def _no_time_for(
        self, row: Row, rows: Sequence[Row], later: Sequence[Row], *, launching: bool
    ) -> str:
        """Return why a row does not fit into the remaining time, or "" if it does.

        See Note [Which rows run].
        """
        more_valuable = {other.name for other in rows[: rows.index(row)]}
        reserved = [
            other for other in later if other.name in more_valuable and not other.unavailable
        ]
        launches = int(launching) + len({(other.ranks, other.own_process) for other in reserved})
        planned = row.planned_seconds + sum(other.planned_seconds for other in reserved)
        needed = planned + launches * LAUNCH_PLANNED_SECONDS
        left = max(0.0, self.seconds_left())
        if needed <= left:
            return ""

        reserved_text = f", {needed - row.planned_seconds:.0f} s are reserved" if reserved else ""
        return (
            f"planned for {row.planned_seconds:.0f} s{reserved_text}, and {left:.0f} s of "
            f"{self.budget_seconds / 60:g} minutes are left; raise --minutes or use --only"
        )


class _Launch:
    """Launch of processes that run several rows one after another. See Note [Turns]."""

    def __init__(
        self,
        runner: Runner,
        pending: list[Row],
        rows: Sequence[Row],
        later: Sequence[Row],
        facts: Mapping[str, Any],
    ) -> None:
        """Prepare a launch. Rows are removed from `pending` when they have a result."""
        self._runner = runner
        self._pending = pending
        self._launched = list(pending)
        self._rows = rows
        self._later = later
        self._facts = facts
        self._running = False
        self._gave_end_turn = False
        self._partial: dict[str, Any] = {}
        self._since = time.monotonic()
        self._offset = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()

    def results(self) -> Iterator[Result]:
        """Run the rows, and yield their results until all rows or the processes have ended."""
        with tempfile.TemporaryDirectory(prefix="plait-validate-") as name:
            self._folder = Path(name)
            self._start()
            try:
                yield from self._watch()
            finally:
                self._end()

    def _start(self) -> None:
        content = {"facts": dict(self._facts), "rows": [asdict(row) for row in self._launched]}
        (self._folder / ROWS).write_text(json.dumps(content), encoding="utf-8")
        self._write_turn()
        with (self._folder / ERRORS).open("wb") as errors:
            self._process = subprocess.Popen(
                self._runner.command(self._launched[0].ranks, self._folder),
                # Closed when this process ends, whereupon the launcher ends as well.
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                # Ctrl-C reaches only this process, which stops the launch itself.
                start_new_session=True,
            )
        self._since = time.monotonic()

    def _watch(self) -> Iterator[Result]:
        assert self._process is not None
        while True:
            # Checked before the events are read, so that no event of a process that has ended is
            # missed.
            exited = self._process.poll() is not None
            for result in self._read():
                yield result
                yield from self._runner.skip(self._pending, self._rows, self._later)
                self._write_turn()
            if not self._pending:
                return
            if exited:
                yield from self.unfinished("failed", self._why_ended())
                return
            if self._runner.seconds_left() <= 0:
                minutes = self._runner.budget_seconds / 60
                reason = f"the budget of {minutes:g} minutes was used up while it ran"
                yield from self.unfinished("not run", reason)
                return
            late = self._late()
            if late:
                yield from self.unfinished("failed", late)
                return
            time.sleep(_POLL_SECONDS)

    def _write_turn(self) -> None:
        """Append the index of the next row, or the end marker, to TURNS. See Note [Turns]."""
        turn = str(self._launched.index(self._pending[0])) if self._pending else END_TURN
        with (self._folder / TURNS).open("a", encoding="utf-8") as file:
            file.write(turn + "\n")
        self._gave_end_turn = not self._pending

    def _read(self) -> Iterator[Result]:
        """Read new lines of EVENTS, and yield the results in them. See Note [Turns].

        The last line may be incomplete. It is then read in the next call.
        """
        events = self._folder / EVENTS
        if not events.exists():
            return
        with events.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        # The rest is read again when its line is complete.
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            result = self._take(json.loads(line))
            if result is not None:
                yield result

    def _take(self, event: Mapping[str, Any]) -> Result | None:
        row = self._pending[0]
        assert event["row"] == row.name, f"{event} while {row.name} was to come"
        if event["event"] == "began":
            self._running = True
            self._since = time.monotonic()
            self._partial = {}
            self._runner.began(row)
            return None
        if event["event"] == "progress":
            self._partial |= event["numbers"]
            return None
        numbers = event["numbers"]
        # A check that raises has no other numbers than those that it has reported before.
        if event["outcome"] == "failed":
            numbers = {**self._partial, **numbers}
        return self._finished(event["outcome"], event["reason"], numbers)

    def _finished(self, outcome: Outcome, reason: str, numbers: Mapping[str, Any]) -> Result:
        row = self._pending.pop(0)
        seconds = time.monotonic() - self._since if self._running else 0.0
        self._running = False
        self._since = time.monotonic()
        return Result(row.name, row.title, outcome, reason, seconds, row.planned_seconds, numbers)

    def unfinished(self, outcome: Outcome, reason: str) -> list[Result]:
        """Return the result of the row that was running, with its partial measurements.

        The list is empty if no row was running.
        """
        if not self._pending:
            return []
        return [self._finished(outcome, reason, self._partial)]

    def _late(self) -> str:
        """Return why the running row must be stopped, or "" if it may continue."""
        limit = self._pending[0].limit_seconds if self._running else LAUNCH_LIMIT_SECONDS
        if time.monotonic() - self._since <= limit:
            return ""
        if self._running:
            return f"ran for more than {limit:.0f} s and was stopped"
        return f"its processes did not start within {limit:.0f} s"

    def _why_ended(self) -> str:
        assert self._process is not None
        output = _last_lines(self._folder / ERRORS)
        reason = f"its processes ended with exit code {self._process.returncode}"
        return f"{reason}: {output}" if output else reason

    def _end(self) -> None:
        assert self._process is not None
        # Only processes that have read the end of the turns end by themselves.
        if self._gave_end_turn:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
        stop(self._process)


def batches(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows into launches: one per number of ranks, and one per row that needs its own launch.

    Rows that cannot run on this machine are in the group of their number of ranks. They start no
    process.
    """
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.ranks, row.name if row.own_process else ""), []).append(row)
    # Shared launches first. Rows with their own process follow, in the same number of ranks.
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0], bool(key[1])))]


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the processes of a launch with SIGTERM, and with SIGKILL if they continue."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    # The launch has a session of its own, so the signal reaches the launcher and all ranks.
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)


def _last_lines(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = map(str.strip, text.splitlines())
    shown = [line for line in lines if line and not _WARNING.match(line)]
    return " | ".join(shown[-_REPORTED_LINES:])[-2000:]
