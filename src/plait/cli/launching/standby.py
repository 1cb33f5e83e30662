"""Standby processes: interpreters with finished imports, so that a restart does not wait for them.

Note [Standby processes]
    The first rank of a machine lists the modules that it has imported (`worker`). Then one standby
    process per rank is started, which imports the same modules and waits. When torch's agent starts
    the ranks again, each standby process becomes a rank: it receives the arguments, the environment
    and the output files of the rank. If no standby process is ready, a new process is started.
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
from plait.names import number_of
from plait.sizes import format_bytes

VARIABLE = "PLAIT_STANDBY"
"""Variable with the path of the list of imports, in the environment of the ranks."""


@dataclass
class _StandbyProcess:
    popen: subprocess.Popen[bytes]
    connection: socket.socket
    requested: int = 0
    """Number of import requests that it received."""
    answered: int = 0
    """Number of import requests that it has finished."""

    @property
    def ready(self) -> bool:
        """True if the process runs and has finished all requested imports."""
        with suppress(BlockingIOError, ConnectionError):
            self.answered += self.connection.recv(64, socket.MSG_DONTWAIT).count(b"\n")
        return self.popen.poll() is None and 0 < self.requested == self.answered


@dataclass
class Standby:
    """Standby processes of one launch on this machine. See Note [Standby processes]."""

    count: int
    """Number of standby processes: that of the ranks on this machine, or 0."""
    folder: Path
    """Folder that only this user can read, and that is removed with the launch."""
    worker: Path
    say: Callable[[str], None]
    _processes: list[_StandbyProcess] = field(default_factory=list)
    _list_mtime_ns: int = 0
    _list_versions: int = 0
    """Number of times that the list of imports was written."""
    _is_reported: bool = False

    def environment(self) -> dict[str, str]:
        """Return the environment variables that make a rank list its imports."""
        return {VARIABLE: str(self._import_list)} if self.count else {}

    def poll(self) -> None:
        """Start missing standby processes, and ask all of them to import newly listed modules.

        The launcher calls this while the ranks run.

        Does nothing until the first rank has listed its imports.
        """
        try:
            mtime_ns = self._import_list.stat().st_mtime_ns
        except OSError:
            return
        if mtime_ns != self._list_mtime_ns:
            self._list_mtime_ns = mtime_ns
            self._list_versions += 1
        self._processes = [process for process in self._processes if process.popen.poll() is None]
        while len(self._processes) < self.count:
            self._processes.append(self._start())
        for process in self._processes:
            while process.requested < self._list_versions:
                process.requested += 1
                with suppress(ConnectionError):
                    process.connection.sendall(b"import\n")
        if not self._is_reported and all(process.ready for process in self._processes):
            self._is_reported = True
            memory = sum(process_bytes(process.popen.pid) for process in self._processes)
            self.say(
                f"{number_of(self.count, 'process')} standing by for a restart:"
                f" {format_bytes(memory)} of memory"
            )

    def take(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        files: Sequence[IO[str] | None],
    ) -> subprocess.Popen[bytes] | None:
        """Turn a standby process into a rank.

        Args:
            arguments: Command that would start the rank: Python, its options, the worker and the
                arguments of the worker.
            environment: Environment of the rank.
            files: Files for standard output and standard error. None for those of the launcher.

        Returns:
            The process, or None if no process is ready.
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
        # The environment may contain secrets, so that only this user may read the file.
        descriptor = os.open(order, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as order_file:
            json.dump(content, order_file)
        descriptors = [file.fileno() for file in files if file is not None]
        try:
            # Open files can be passed to a running process only over a Unix socket.
            socket.send_fds(ready.connection, [f"run {order}\n".encode()], descriptors)
        except ConnectionError:
            return None
        self._processes.remove(ready)
        # The process that takes its place is reported again.
        self._is_reported = False
        ready.connection.close()
        return ready.popen

    def close(self) -> None:
        """End the processes that did not become ranks."""
        for process in self._processes:
            process.popen.kill()
            process.popen.wait()
            process.connection.close()
        self._processes = []

    @property
    def _import_list(self) -> Path:
        return self.folder / "imports.json"

    def _start(self) -> _StandbyProcess:
        connection, child_connection = socket.socketpair()
        with child_connection:
            descriptor = child_connection.fileno()
            launcher = str(os.getpid())
            popen = subprocess.Popen(
                [sys.executable, "-u", str(self.worker), launcher, "--stand-by", str(descriptor)],
                pass_fds=(descriptor,),
                # torch's agent also starts each rank in a new session.
                start_new_session=True,
            )
        return _StandbyProcess(popen, connection)
