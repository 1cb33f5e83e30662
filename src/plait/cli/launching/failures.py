"""Reports of failed ranks, with the cause first, and of ranks that hang.

If one rank raises, the other ranks fail after it, because they lose a connection or receive a
signal of the launcher. The cause is printed immediately and completely. Every other failure is
printed in one line. The module does not use torch: it reads the records that `worker` writes.

A rank publishes on its board (`comm.hang.Board`) which operation it runs or waits for, and writes
its stacks after a signal. Both work even if the rank is blocked while it holds the GIL. The
launcher reports a hang, with the late rank and its stack, before any rank reaches its own timeout.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from plait.cluster import accelerator
from plait.cluster.topology import WATCH_FOLDER
from plait.comm import hang, stacks
from plait.comm.hang import BoardContent, read_board

POLL_SECONDS = 0.1
_HANG = -1
"""Value in place of the rank whose failure was reported, after the report of a hang."""

_LOST_PEER = re.compile(
    r"CommunicationError: |(RuntimeError|Dist\w*Error|Connection\w*Error|BrokenPipeError): .*"
    r"(connection (closed|reset|refused)|broken pipe|socket|remote process|\bpeer\b|timed"
    r" ?out|timeout|aborted|watchdog|"
    rf"{accelerator.LOST_PEER})",
    re.IGNORECASE | re.DOTALL,
)
"""Messages of collectives and stores after another process has ended.

They are the effect of a failure, not its cause.
"""


@dataclass(frozen=True)
class FailureRecord:
    """Exception that a rank recorded in its error file.

    Attributes:
        is_message: Whether the text is a message for the user, which is shown without a traceback.
    """

    time_ns: int
    exit_code: int
    pid: int
    summary: str
    text: str
    is_message: bool

    @property
    def lost_peer(self) -> bool:
        """True if this failure looks like a consequence of another rank's exit."""
        return _LOST_PEER.match(self.summary) is not None


@dataclass(frozen=True)
class Failure:
    """Exit of a rank with a non-zero exit code, which is negative if a signal killed the rank."""

    rank: int
    exit_code: int
    noticed_ns: int
    record: FailureRecord | None = None
    was_running: bool = False
    """True if the rank still ran when the launcher noticed another failure and ended all ranks."""

    @property
    def stopped(self) -> bool:
        """True if the rank ended because the launcher stopped it."""
        codes = [-signal.SIGTERM, 128 + signal.SIGTERM]
        if self.was_running:
            # It did not end after SIGTERM.
            codes.append(-signal.SIGKILL)
        return self.record is None and self.exit_code in codes

    @property
    def order(self) -> tuple[bool, bool, int]:
        """Key that sorts causes before effects, and then by time."""
        if self.record is None:
            return self.stopped, False, self.noticed_ns
        return self.stopped, self.record.lost_peer, self.record.time_ns


def read_record(path: str | Path) -> FailureRecord | None:
    """Return the record in an error file, or None if the file does not exist or is incomplete.

    Files of torch's `record` decorator can also be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    message = content.get("message", "")
    if not isinstance(message, dict):
        # The message in a file of torch can be a plain text.
        lines = str(message).splitlines()
        return FailureRecord(
            time_ns=int(content.get("timestamp", 0)) * 10**9,
            exit_code=1,
            pid=0,
            summary=lines[-1] if lines else "",
            text=str(message),
            is_message=False,
        )
    fields = content.get("plait", {})
    extra = message.get("extraInfo", {})
    return FailureRecord(
        time_ns=fields.get("time_ns", int(extra.get("timestamp", 0)) * 10**9),
        exit_code=fields.get("exit_code", 1),
        pid=fields.get("pid", 0),
        summary=str(message.get("message", "")),
        text=str(extra.get("py_callstack", message.get("message", ""))).rstrip(),
        is_message=fields.get("told", False),
    )


def first_cause(failures: list[Failure]) -> Failure:
    """Return the failure that caused the other failures of an attempt."""
    return min(failures, key=lambda failure: failure.order)


def process_exit_code(failure: Failure) -> int:
    """Return the exit code of the launcher: that of the rank, or 128 + N for signal N."""
    if failure.record is not None:
        return failure.record.exit_code
    if failure.exit_code > 0:
        return failure.exit_code
    # The exit code -N stands for signal N, which shells report as 128 + N.
    return 128 - failure.exit_code


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Reporter:
    """Reporter of failures from the error files of the ranks on this machine.

    The cause of each failed attempt is reported once, as soon as it is certain.
    """

    def __init__(self, node: str, emit: Callable[[str], None] = _print) -> None:
        """Report the failures of the ranks on a machine.

        Args:
            node: Name of the machine.
            emit: Receives the lines of the report.
        """
        self._node = node
        self._emit = emit
        self._lock = threading.Lock()
        self._files: dict[int, str] = {}
        self._reported_rank: int | None = None
        """Rank whose failure was reported as the cause of this attempt."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="plait-failures", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def watch(self, files: Mapping[int, str]) -> None:
        """Begin a new attempt. `files` are the error files of its ranks."""
        with self._lock:
            self._files = dict(files)
            self._reported_rank = None

    def report_hang(self, text: str) -> None:
        """Report ranks that hang. All later failures are consequences of the hang."""
        with self._lock:
            self._reported_rank = _HANG
            self._emit(text)

    def report_restart(self) -> None:
        """Report that the ranks start again."""
        self._emit("plait: starting the ranks again")

    def failed_and_running(self, running: Collection[int], seconds: float) -> dict[int, int]:
        """Return the exit codes of failed ranks whose process still runs after some time.

        Something keeps these processes from exiting, for example a thread or a communicator.

        Args:
            running: Ranks whose process still runs.
            seconds: Shortest time since the failure.
        """
        exit_codes = {}
        with self._lock:
            for rank in running:
                record = self._read_record(rank)
                if record is not None and time.time_ns() - record.time_ns > seconds * 1e9:
                    exit_codes[rank] = record.exit_code
        return exit_codes

    def report_attempt(
        self,
        exit_codes: Mapping[int, int],
        noticed_ns: int,
        *,
        ended: Collection[int] = (),
        running: Collection[int] = (),
        restarting: bool = False,
    ) -> Failure:
        """Report the end of an attempt: its cause, unless already reported, and the other failures.

        Args:
            exit_codes: Exit codes of the failed ranks.
            noticed_ns: Time at which the failures were noticed.
            ended: Ranks that had ended with exit code 0 before the failures.
            running: Failed ranks that still ran when the failure of another rank was noticed.
            restarting: Whether the ranks start again.

        Returns:
            The cause.
        """
        with self._lock:
            failures = [
                Failure(rank, code, noticed_ns, self._read_record(rank), rank in running)
                for rank, code in exit_codes.items()
            ]
            cause = first_cause(failures)
            if self._reported_rank is None:
                if ended and cause.record is not None and cause.record.lost_peer:
                    self._emit(
                        f"plait: {_format_ranks(ended)} (node {self._node}) ended with exit code 0"
                        " before the others, which wait for it"
                    )
                self._report_cause(cause)
            for failure in failures:
                # What was printed as the cause stays the cause.
                if failure.rank == self._reported_rank:
                    cause = failure
            others = [failure for failure in failures if failure is not cause]
            self._report_others(cause, sorted(others, key=lambda failure: failure.rank))
            if restarting:
                self.report_restart()
            return cause

    def _read_record(self, rank: int) -> FailureRecord | None:
        return read_record(self._files.get(rank, os.devnull))

    def _watch(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            with self._lock:
                if self._reported_rank is None:
                    self._report_certain_cause()

    def _report_certain_cause(self) -> None:
        """Report the first failure that is known to be a cause and not a consequence.

        The failure of a rank that lost a peer may be a consequence, because the peer may have died
        without writing a record. Such a failure is reported only when all ranks have ended.
        """
        failures = []
        for rank in self._files:
            record = self._read_record(rank)
            if record is not None and not record.lost_peer:
                failures.append(Failure(rank, record.exit_code, record.time_ns, record))
        if failures:
            self._report_cause(min(failures, key=lambda failure: failure.noticed_ns))

    def _report_cause(self, failure: Failure) -> None:
        self._reported_rank = failure.rank
        record = failure.record
        if record is None:
            self._emit(
                f"plait: {self._describe_rank(failure)} {_describe_end(failure.exit_code)}; it"
                " recorded no exception, see its output above"
            )
            return
        if record.is_message:
            self._emit(f"plait: {record.text}")
            return
        self._emit(
            f"plait: {self._describe_rank(failure)} failed with exit code {record.exit_code}. Its"
            f" traceback:\n{record.text}"
        )
        if record.lost_peer:
            self._emit(
                "plait: a rank that this one was connected to ended first: look for its failure"
                " on the other machines"
            )

    def _report_others(self, cause: Failure, others: list[Failure]) -> None:
        is_message = cause.record is not None and cause.record.is_message
        same = [failure for failure in others if _has_same_summary(failure, cause)]
        stopped = [failure for failure in others if failure.stopped]
        if same and not is_message:
            ranks = _format_ranks([failure.rank for failure in same])
            self._emit(f"plait: {ranks} failed in the same way")
        for failure in others:
            if failure not in same and failure not in stopped:
                self._emit(f"plait: {self._describe_failure(failure)}")
        if stopped and not is_message:
            ranks = _format_ranks([failure.rank for failure in stopped])
            verb = "was" if len(stopped) == 1 else "were"
            self._emit(f"plait: {ranks} {verb} stopped")

    def _describe_failure(self, failure: Failure) -> str:
        rank = self._describe_rank(failure)
        if failure.record is None:
            return f"{rank} {_describe_end(failure.exit_code)}"
        return (
            f"{rank} failed too, with exit code {failure.record.exit_code}:"
            f" {failure.record.summary.splitlines()[0][:160]}"
        )

    def _describe_rank(self, failure: Failure) -> str:
        pid = ""
        if failure.record is not None and failure.record.pid:
            pid = f", process {failure.record.pid}"
        return f"rank {failure.rank} (node {self._node}{pid})"


def _has_same_summary(failure: Failure, other: Failure) -> bool:
    if failure.record is None or other.record is None:
        return False
    return failure.record.summary == other.record.summary


def _format_ranks(ranks: Collection[int]) -> str:
    numbers = ", ".join(map(str, sorted(ranks)))
    if len(ranks) == 1:
        return f"rank {numbers}"
    return f"ranks {numbers}"


def _describe_end(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        # Most real-time signals have no name.
        name = "unknown"
    hint = ""
    # The kernel kills processes with SIGKILL if the machine runs out of memory.
    if -exit_code == signal.SIGKILL:
        hint = " (out of memory?)"
    return f"was killed by signal {-exit_code} {name}{hint}"


HANG_POLL_SECONDS = 0.5
STACK_SECONDS = 2.0
"""Time for a rank to write its stacks."""
STACK_SIGNAL = "PLAIT_STACK_SIGNAL"
"""Variable that tells `worker` which signal requests the stacks."""


def environment(folder: Path) -> dict[str, str]:
    """Return the environment variables that make ranks publish their progress.

    Args:
        folder: Folder for boards and stacks, which is removed when the launch ends.
    """
    return {WATCH_FOLDER: str(folder), STACK_SIGNAL: str(int(stacks.SIGNAL))}


class RankWatch:
    """Hang detection for the ranks of one launch on this machine."""

    def __init__(
        self, folder: Path, *, stack_folder: Path | None, emit: Callable[[str], None]
    ) -> None:
        """Watch the ranks that have the variables of `environment(folder)`.

        Args:
            folder: Folder of boards and stacks.
            stack_folder: Folder in which the stacks of a hang are kept. None for a new one.
            emit: Receives the lines of a report.
        """
        self._folder = folder
        self._stack_folder = stack_folder
        self._emit = emit
        self._last_poll = 0.0

    def hangs(self, processes: Mapping[int, int]) -> bool:
        """If a rank has waited longer than its timeout, report a hang and return True.

        Args:
            processes: Process ids by rank of this machine, including those that have ended.
        """
        now = time.monotonic()
        # The agent polls more often than boards have to be read.
        if now - self._last_poll < HANG_POLL_SECONDS:
            return False
        self._last_poll = now
        readings = self._read_boards(processes)
        detected = hang.find_hang(readings, now)
        if detected is None:
            return False

        states = {
            rank: stacks.state(processes[rank]) for rank in detected.suspects if rank in readings
        }
        ended = [rank for rank, state in states.items() if state in stacks.ENDED]
        self._emit(f"plait: {hang.describe_cause(detected, readings, ended=ended)}")
        folder = self._stack_folder or stacks.new_folder()
        for rank, state in states.items():
            stack = None
            if state not in stacks.ENDED:
                process = processes[rank]
                stack = stacks.collect(
                    process,
                    self._folder / f"{process}.stack",
                    folder / f"rank-{rank}.txt",
                    STACK_SECONDS,
                )
            condition = hang.condition(
                readings[rank],
                now,
                state=state,
                line=stacks.users_line(stack),
                stack=str(stack or ""),
            )
            self._emit(f"plait: {condition}")
        return True

    def _read_boards(self, processes: Mapping[int, int]) -> dict[int, BoardContent]:
        readings = {}
        for rank, process in processes.items():
            reading = read_board(self._folder / f"{process}.board")
            # A board of another process remains from an earlier attempt.
            if reading is None or reading.process != process:
                continue
            if stacks.state(process) in stacks.ENDED:
                reading = replace(reading, waits=())
            readings[rank] = reading
        return readings
