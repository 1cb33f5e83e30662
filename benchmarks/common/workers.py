"""Groups of persistent worker processes that wait for their turn.

A worker group is one baseline: spawned processes with the environment of a process group, which
read messages from pipes. A waiting worker blocks in a read, so that only one group computes.
Workers write to a log file, which is shown if one of them fails.
"""

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
"""Called once in the worker with the argument of the group. Returns what answers messages."""


class WorkerGroupError(RuntimeError):
    """A worker failed, died or did not answer. The message ends with its last output."""


def free_port() -> int:
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
        world = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(ranks))
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "GROUP_RANK": "0"}
        for rank, log in enumerate(self.logs):
            ours, theirs = context.Pipe()
            place = {**environment, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = (start, argument, place, str(log), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    @property
    def pids(self) -> tuple[int, ...]:
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
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        answers: list[Any] = [None] * len(self.pipes)
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = list(waiting.values())
                problem = f"no answer from rank {silent} in {timeout_seconds:.0f} s"
                raise self._error(problem, silent[0])
            for pipe in self.pipes:
                if pipe not in ready:
                    continue
                rank = waiting.pop(pipe)
                try:
                    status, value = pipe.recv()
                except EOFError:
                    raise self._error(f"rank {rank} died", rank) from None
                if status != kind:
                    raise self._error(f"rank {rank} failed\n{value}", rank)
                answers[rank] = value
        return answers

    def _error(self, problem: str, rank: int) -> WorkerGroupError:
        with suppress(OSError):
            lines = self.logs[rank].read_text(errors="replace").splitlines()[-15:]
            if lines:
                problem += "\n  its last output:\n    " + "\n    ".join(lines)
        return WorkerGroupError(f"{self.name}: {problem}")

    def stop(self, *, patience_seconds: float = 10) -> None:
        for pipe in self.pipes:
            with suppress(OSError):  # it may have ended by itself
                pipe.send(None)
        deadline = time.monotonic() + patience_seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
