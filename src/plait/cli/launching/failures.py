"""How ranks failed, and telling it so that the first line a user reads is the cause.

When one rank raises, the others fail after it (a lost connection, a signal from the launcher). The
cause is printed at once, in full and labelled; each of the others in one line. Knows nothing of
torch: it reads the records that `worker` writes.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from plait.cluster import accelerator

POLL_SECONDS = 0.1
NOBODY = -1
"""In place of the rank whose failure was told: the ranks hang, and none has failed."""

_LOST_PEER = re.compile(
    r"CommunicationError: |(RuntimeError|Dist\w*Error|Connection\w*Error|BrokenPipeError): .*"
    r"(connection (closed|reset|refused)|broken pipe|socket|remote process|\bpeer\b|timed"
    r" ?out|timeout|aborted|watchdog|"
    rf"{accelerator.LOST_PEER})",
    re.IGNORECASE | re.DOTALL,
)
"""What a collective or the store says when another process is gone: the effect of a failure and not
its cause.
"""


@dataclass(frozen=True)
class Record:
    """What a rank wrote about its own exception. `told` marks a sentence for the user, to be shown
    without a traceback.
    """

    time_ns: int
    exit_code: int
    pid: int
    summary: str
    text: str
    told: bool

    @property
    def lost_peer(self) -> bool:
        """Whether this looks like the effect of another rank's end."""
        return _LOST_PEER.match(self.summary) is not None


@dataclass(frozen=True)
class Failure:
    """A rank that ended with an exit code other than 0 (negative: killed by that signal)."""

    rank: int
    exit_code: int
    noticed_ns: int
    record: Record | None = None

    @property
    def stopped(self) -> bool:
        """Whether it ended because the launcher stopped it."""
        return self.record is None and self.exit_code in (-signal.SIGTERM, 128 + signal.SIGTERM)

    @property
    def order(self) -> tuple[bool, bool, int]:
        """Sorts causes before effects, then by time."""
        lost_peer = self.record is not None and self.record.lost_peer
        return (
            self.stopped,
            lost_peer,
            self.record.time_ns if self.record is not None else self.noticed_ns,
        )


def read(path: str | Path) -> Record | None:
    """The record in an error file; None while there is none. Understands those of torch's own
    `record` decorator too.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    message = content.get("message", "")
    own = content.get("plait", {})
    if not isinstance(message, dict):
        return Record(
            int(content.get("timestamp", 0)) * 10**9,
            1,
            0,
            str(message).splitlines()[-1] if message else "",
            str(message),
            False,
        )
    extra = message.get("extraInfo", {})
    return Record(
        time_ns=own.get("time_ns", int(extra.get("timestamp", 0)) * 10**9),
        exit_code=own.get("exit_code", 1),
        pid=own.get("pid", 0),
        summary=str(message.get("message", "")),
        text=str(extra.get("py_callstack", message.get("message", ""))).rstrip(),
        told=own.get("told", False),
    )


def first(failures: list[Failure]) -> Failure:
    """The cause among the failures of one attempt."""
    return min(failures, key=lambda failure: failure.order)


def process_exit_code(failure: Failure) -> int:
    """What the launcher exits with: the rank's own code, 128 + N for signal N as shells have it."""
    if failure.record is not None:
        return failure.record.exit_code
    return failure.exit_code if failure.exit_code > 0 else 128 - failure.exit_code


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Reporter:
    """Watches the error files of the ranks on this machine while they run, and tells each attempt's
    cause once.
    """

    def __init__(self, node: str, tell: Callable[[str], None] = _print) -> None:
        self._node = node
        self._tell = tell
        self._lock = threading.Lock()
        self._files: dict[int, str] = {}
        self._told: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="plait-failures", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def watch(self, files: Mapping[int, str]) -> None:
        """A new attempt begins; `files` maps a rank to its error file."""
        with self._lock:
            self._files = dict(files)
            self._told = None

    def tell_hang(self, text: str) -> None:
        """A line about ranks that hang: what fails from now on is its effect."""
        with self._lock:
            self._told = NOBODY
            self._tell(text)

    def tell_restart(self) -> None:
        """The ranks start again."""
        self._tell("plait: starting the ranks again")

    def failed_and_running(self, running: Collection[int], seconds: float) -> dict[int, int]:
        """The exit codes of the ranks that have failed so long ago, and still run: something blocks
        their end.
        """
        with self._lock:
            records = {
                rank: record
                for rank in running
                if (record := read(self._files.get(rank, os.devnull))) is not None
            }
            return {
                rank: record.exit_code
                for rank, record in records.items()
                if time.time_ns() - record.time_ns > seconds * 1e9
            }

    def failed(
        self,
        exit_codes: Mapping[int, int],
        noticed_ns: int,
        *,
        ended: Collection[int] = (),
        restarting: bool = False,
    ) -> Failure:
        """An attempt is over: tell its cause if that was not done, and the rest in a line each.
        `ended`: ranks that had ended before with exit code 0. Returns the cause.
        """
        with self._lock:
            failures = [
                Failure(rank, code, noticed_ns, read(self._files.get(rank, os.devnull)))
                for rank, code in exit_codes.items()
            ]
            cause = first(failures)
            if self._told is None:
                if ended and cause.record is not None and cause.record.lost_peer:
                    self._tell(
                        f"plait: {_ranks(ended)} (node {self._node}) ended with exit code 0 before"
                        " the others, which wait for it"
                    )
                self._tell_cause(cause)
            cause = next((failure for failure in failures if failure.rank == self._told), cause)
            self._tell_others(
                cause,
                sorted((f for f in failures if f is not cause), key=lambda failure: failure.rank),
            )
            if restarting:
                self.tell_restart()
            return cause

    def _watch(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            with self._lock:
                if self._told is None:
                    self._tell_if_sure()

    def _tell_if_sure(self) -> None:
        """A lost peer may be the effect of a rank that died without a record, so it waits until all
        have ended.
        """
        found = [
            (rank, record)
            for rank, path in self._files.items()
            if (record := read(path)) is not None and not record.lost_peer
        ]
        if found:
            rank, record = min(found, key=lambda item: item[1].time_ns)
            self._tell_cause(Failure(rank, record.exit_code, record.time_ns, record))

    def _tell_cause(self, failure: Failure) -> None:
        self._told = failure.rank
        record = failure.record
        if record is not None and record.told:
            self._tell(f"plait: {record.text}")
        elif record is not None:
            self._tell(
                f"plait: {self._who(failure)} failed with exit code {record.exit_code}. Its"
                f" traceback:\n{record.text}"
            )
            if record.lost_peer:
                self._tell(
                    "plait: a rank that this one was connected to ended first: look for its failure"
                    " on the other machines"
                )
        else:
            self._tell(
                f"plait: {self._who(failure)} {_how(failure.exit_code)}; it recorded no exception,"
                " see its output above"
            )

    def _tell_others(self, cause: Failure, others: list[Failure]) -> None:
        told = cause.record is not None and cause.record.told
        same = [
            f
            for f in others
            if cause.record is not None
            and f.record is not None
            and f.record.summary == cause.record.summary
        ]
        stopped = [failure for failure in others if failure.stopped]
        if same and not told:
            self._tell(
                f"plait: {_ranks([failure.rank for failure in same])} failed in the same way"
            )
        for failure in others:
            if failure not in same and failure not in stopped:
                self._tell(f"plait: {self._line(failure)}")
        if stopped and not told:
            self._tell(
                f"plait: {_ranks([failure.rank for failure in stopped])}"
                f" {'was' if len(stopped) == 1 else 'were'} stopped"
            )

    def _line(self, failure: Failure) -> str:
        who = self._who(failure)
        if failure.record is None:
            return f"{who} {_how(failure.exit_code)}"
        return (
            f"{who} failed too, with exit code {failure.record.exit_code}:"
            f" {failure.record.summary.splitlines()[0][:160]}"
        )

    def _who(self, failure: Failure) -> str:
        pid = (
            f", process {failure.record.pid}"
            if failure.record is not None and failure.record.pid
            else ""
        )
        return f"rank {failure.rank} (node {self._node}{pid})"


def _ranks(ranks: Collection[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, sorted(ranks)))}"


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "unknown"
    hint = " (out of memory?)" if -exit_code == signal.SIGKILL else ""
    return f"was killed by signal {-exit_code} {name}{hint}"
