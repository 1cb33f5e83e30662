"""Groups of persistent worker processes that wait for their turn.

A worker group is one baseline: spawned processes with the environment of a process group, which
read messages from pipes. A waiting worker blocks in a read, so that only one group computes. Workers
write to a log file, which is shown if one of them fails.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Handler = Callable[[Any], Any]
Start = Callable[[Any], Handler]
"""Is called once in the worker with the argument of the group, and returns what answers messages."""


class WorkerGroupError(RuntimeError):
    """A worker failed, died or did not answer. The message ends with its last output."""


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(
    start: Start, argument: Any, environment: Mapping[str, str], log: str, pipe: Connection
) -> None:
    """Run one worker until it receives None."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.environ.update(environment)
    try:
        handle = start(argument)
        pipe.send(("ready", None))
        while (message := pipe.recv()) is not None:
            pipe.send(("answer", handle(message)))
    except EOFError:
        pass
    except BaseException:  # whatever ends a worker has to reach the parent
        pipe.send(("failed", traceback.format_exc()))


class WorkerGroup:
    """The worker processes of one baseline."""

    def __init__(
        self,
        name: str,
        *,
        ranks: int,
        start: Start,
        argument: Any,
        logs: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self.logs = [logs / f"{name}.{rank}.log" for rank in range(ranks)]
        context = get_context("spawn")
        self.port = free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "LOCAL_SIZE": str(ranks),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
            }
            process = context.Process(
                target=_serve,
                args=(start, argument, {**environment, **place}, str(self.logs[rank]), theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in the order of ranks."""
        return tuple(process.pid for process in self.processes if process.pid is not None)

    def ready(self, *, timeout_seconds: float) -> None:
        """Wait until every worker has started. Raises WorkerGroupError."""
        self._collect("ready", timeout_seconds)

    def ask(self, message: Any, *, timeout_seconds: float) -> list[Any]:
        """Send a message to every worker and return the answers. Raises WorkerGroupError."""
        for pipe in self.pipes:
            pipe.send(message)
        return self._collect("answer", timeout_seconds)

    def _collect(self, kind: str, timeout_seconds: float) -> list[Any]:
        deadline = time.monotonic() + timeout_seconds
        answers: dict[int, Any] = {}
        while len(answers) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            left = deadline - time.monotonic()
            spoken = wait(waiting, timeout=max(0.0, left))
            for rank, pipe in enumerate(self.pipes):
                if pipe not in spoken:
                    continue
                try:
                    said, value = pipe.recv()
                except EOFError:
                    raise WorkerGroupError(
                        f"{self.name}: rank {rank} died{self._last_words(rank)}"
                    ) from None
                if said != kind:
                    raise WorkerGroupError(
                        f"{self.name}: rank {rank} failed\n{value}{self._last_words(rank)}"
                    )
                answers[rank] = value
            if left <= 0:
                silent = sorted(set(range(len(self.pipes))) - set(answers))
                raise WorkerGroupError(
                    f"{self.name}: no answer from rank {silent} in {timeout_seconds:.0f} s{self._last_words(silent[0])}"
                )
        return [answers[rank] for rank in range(len(self.pipes))]

    def _last_words(self, rank: int, *, lines: int = 15) -> str:
        try:
            text = self.logs[rank].read_text(errors="replace").splitlines()[-lines:]
        except OSError:
            return ""
        return "\n  its last output:\n    " + "\n    ".join(text) if text else ""

    def stop(self, *, patience_seconds: float = 10) -> None:
        """End the workers, and kill those that do not end in time."""
        for pipe in self.pipes:
            with suppress(OSError):  # it may have ended by itself
                pipe.send(None)
        deadline = time.monotonic() + patience_seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
