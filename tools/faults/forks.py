"""Ranks as forks of a process that has imported torch: two ranks start in half a second."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.workers import free_port

LOADED = (
    "plait",
    "plait.engine.build",
    "plait.train.session",
    "plait.cli.main",
    "torch._dynamo",
    "torch.distributed.fsdp",
)
GRACE_SECONDS = 4.0
"""Time to end for the other ranks after one has failed. A launcher gives them more."""


def load() -> None:
    """Import what every rank needs, before the first fork.

    Nothing may compute or communicate in this process.
    """
    torch.set_num_threads(1)
    for name in LOADED:
        importlib.import_module(name)


class Notes:
    """A file with one line of JSON per event. It is readable after its writers were killed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, event: str, *values: Any) -> None:
        """Append a line in one write, which is atomic."""
        line = json.dumps([event, time.monotonic(), *values]) + "\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, line.encode())
        os.close(handle)

    def read(self, event: str | None = None) -> list[list[Any]]:
        """Return all lines, or those of one event."""
        if not self.path.exists():
            return []
        notes = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [note for note in notes if event in (None, note[0])]


def in_process(function: Callable[..., Any], *args: Any, folder: Path) -> Any:
    """Return what `function` returns, as JSON, from a process that may start threads and groups."""
    answer = folder / f"answer-{function.__name__}"

    def work(_: int) -> None:
        answer.write_text(json.dumps(function(*args)))

    if any(Ranks(work, 1, log=folder / "log").wait(3600).values()):
        raise SystemExit((folder / "log").read_text()[-3000:])
    return json.loads(answer.read_text())


class Ranks:
    """The processes of one run. Each calls `function(rank, *args)` and prints to `log`.

    What the function returns is the exit code.
    """

    def __init__(
        self,
        function: Callable[..., int | None],
        world: int,
        *args: Any,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), **(environment or {})}
        self.pids: dict[int, int] = {}
        self.statuses: dict[int, int] = {}
        for rank in range(world):
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if not pid:
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                _work(lambda rank=rank: function(rank, *args), log, shared | own)
            self.pids[rank] = pid

    def poll(self) -> list[int]:
        """Return the ranks that are running."""
        for rank, pid in self.pids.items():
            if rank not in self.statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.statuses[rank] = os.waitstatus_to_exitcode(status)
        return [rank for rank in self.pids if rank not in self.statuses]

    def kill(self, rank: int) -> None:
        """Send SIGKILL to a rank if it is running."""
        if rank in self.poll():
            os.kill(self.pids[rank], signal.SIGKILL)

    def wait(self, seconds: float) -> dict[int, int]:
        """Wait until all ranks have ended, and return their exit codes.

        The code of a rank that a signal ended is negative. All ranks are killed after `seconds`, or
        `GRACE_SECONDS` after the first failure.
        """
        deadline = time.monotonic() + seconds
        while running := self.poll():
            if any(self.statuses.values()):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > deadline:
                for rank in running:
                    self.kill(rank)
                deadline = time.monotonic() + 5
            time.sleep(0.005)
        return self.statuses


def _work(function: Callable[[], int | None], log: Path, environment: Mapping[str, str]) -> None:
    """Run a rank, and end its process."""
    code = 1
    try:
        os.setpgid(0, 0)
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.environ.update(environment)
        code = function() or 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
