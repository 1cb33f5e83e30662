"""Processes that stand by: interpreters that have imported what the ranks have, so that a restart
does not wait for imports.

The first rank of a machine lists what it has imported (`worker`). Then one process a rank is
started beside the ranks, imports the same and waits. When torch's agent starts the ranks again,
each of them is one of these processes, which is told its arguments, its environment and where it
prints. One that is not ready stays, and the rank is started in the ordinary way.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from plait.cluster.host_memory import process_bytes
from plait.units import format_bytes

VARIABLE = "PLAIT_STANDBY"
"""Names the list of imports; the ranks find it in their environment."""


@dataclass
class _Process:
    """One that stands by."""

    popen: subprocess.Popen[bytes]
    line: socket.socket
    asked: int = 0
    """The version of the list that it was told of last."""
    answered: int = 0

    @property
    def ready(self) -> bool:
        """Whether it has imported what it was told of."""
        with suppress(BlockingIOError, ConnectionError):
            self.answered += self.line.recv(64, socket.MSG_DONTWAIT).count(b"\n")
        return self.popen.poll() is None and 0 < self.asked == self.answered


@dataclass
class Standby:
    """Of one launch on this machine."""

    count: int
    """Ranks on this machine; 0: nothing stands by."""
    folder: Path
    """Private, and gone with the launch."""
    worker: Path
    say: Callable[[str], None]
    _processes: list[_Process] = field(default_factory=list)
    _listed: int = 0
    """The list's time of change."""
    _versions: int = 0
    _told: bool = False

    def environment(self) -> dict[str, str]:
        """What the ranks need."""
        return {VARIABLE: str(self._list)} if self.count else {}

    def look(self) -> None:
        """Called while the ranks run: start processes once it is known what they import, and tell
        them of more.
        """
        try:
            changed = self._list.stat().st_mtime_ns
        except OSError:
            return
        if changed != self._listed:
            self._listed = changed
            self._versions = self._versions + 1
        self._processes = [process for process in self._processes if process.popen.poll() is None]
        while len(self._processes) < self.count:
            self._processes.append(self._started())
        for process in self._processes:
            while process.asked < self._versions:
                process.asked += 1
                with suppress(ConnectionError):
                    process.line.sendall(b"import\n")
        if not self._told and all(process.ready for process in self._processes):
            self._told = True
            taken = sum(process_bytes(process.popen.pid) for process in self._processes)
            self.say(
                f"{self.count} process{'es' * (self.count > 1)} standing by for a restart:"
                f" {format_bytes(taken)} of memory"
            )

    def take(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        files: Sequence[IO[str] | None],
    ) -> subprocess.Popen[bytes] | None:
        """A process that runs `worker` with these from now on; None where none is ready. arguments:
        of the command that would be started, whose first are Python, its options and the worker.
        files: for standard output and error; None leaves the launcher's.
        """
        ready = next((process for process in self._processes if process.ready), None)
        if ready is None or str(self.worker) not in arguments:
            return None
        order = self.folder / f"standby-{ready.popen.pid}.json"
        content = {
            "arguments": list(arguments[list(arguments).index(str(self.worker)) + 1 :]),
            "environment": dict(environment),
            "files": [number for number, file in enumerate(files, 1) if file is not None],
        }
        with open(
            os.open(order, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as file:
            json.dump(content, file)
        try:
            socket.send_fds(
                ready.line,
                [f"run {order}\n".encode()],
                [file.fileno() for file in files if file is not None],
            )
        except ConnectionError:
            return None
        self._processes.remove(ready)
        self._told = False
        ready.line.close()
        return ready.popen

    def close(self) -> None:
        """End those that are left."""
        for process in self._processes:
            process.popen.kill()
            process.popen.wait()
            process.line.close()
        self._processes = []

    @property
    def _list(self) -> Path:
        return self.folder / "imports.json"

    def _started(self) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            popen = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    str(self.worker),
                    str(os.getpid()),
                    "--stand-by",
                    str(theirs.fileno()),
                ],
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # as torch's agent starts a rank
            )
        return _Process(popen, ours)
