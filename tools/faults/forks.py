"""Ranks as forks of one process that has torch in memory: a run of two ranks begins in half a second, and may be ended at any time."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

LOADED = (
    "plait",
    "plait.engine.build",
    "plait.train.session",
    "plait.cli.main",
    "torch._dynamo",
    "torch.distributed.fsdp",
)
ALONE_SECONDS = 4.0
"""What the others get to end in by themselves when a rank was killed; a launcher gives them more."""


def load() -> None:
    """Import what every rank needs. Call once, before the first fork; nothing may compute or communicate in this process."""
    torch.set_num_threads(1)
    for name in LOADED:
        importlib.import_module(name)


def free_port() -> int:
    """Of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Notes:
    """What ranks wrote down, a line each, readable also when they were killed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, what: str, *values: Any) -> None:
        """By a rank. One write is atomic."""
        line = json.dumps([what, time.monotonic(), *values]) + "\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, line.encode())
        os.close(handle)

    def read(self, what: str | None = None) -> list[list[Any]]:
        """All, or those of one kind."""
        try:
            lines = self.path.read_text().splitlines()
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in lines]
        return [one for one in found if what is None or one[0] == what]


def alone(function: Callable[..., Any], *args: Any, folder: Path) -> Any:
    """What `function` returns, as JSON, in a process of its own: what makes a process group or a thread must not do so in this one."""
    answer = folder / f"answer-{function.__name__}"

    def work(_: int) -> None:
        answer.write_text(json.dumps(function(*args)))

    if any(Ranks(work, 1, log=folder / "log").wait(3600).values()):
        raise SystemExit((folder / "log").read_text()[-3000:])
    return json.loads(answer.read_text())


class Ranks:
    """Of one run."""

    def __init__(
        self,
        function: Callable[..., int | None],
        world: int,
        *args: Any,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`function(rank, *args)` runs in each; what it returns is the exit code. They print to `log`."""
        port = free_port()
        self.pids: dict[int, int] = {}
        self.statuses: dict[int, int] = {}
        for rank in range(world):
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if not pid:
                self._child(function, rank, world, port, args, log, environment or {})
            self.pids[rank] = pid

    def _child(
        self,
        function: Callable[..., int | None],
        rank: int,
        world: int,
        port: int,
        args: Any,
        log: Path,
        environment: Mapping[str, str],
    ) -> None:
        code = 1
        try:
            os.setpgid(0, 0)
            handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
            }
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environment}
            code = function(rank, *args) or 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def poll(self) -> dict[int, int]:
        """Those that run: rank to process."""
        for rank, pid in self.pids.items():
            if rank not in self.statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.statuses[rank] = os.waitstatus_to_exitcode(status)
        return {rank: pid for rank, pid in self.pids.items() if rank not in self.statuses}

    def kill(self, rank: int) -> None:
        """One rank, at once."""
        if rank in self.poll():
            os.kill(self.pids[rank], signal.SIGKILL)

    def wait(self, seconds: float, *, after_death: float = ALONE_SECONDS) -> dict[int, int]:
        """Exit codes by rank (negative: the signal), when all have ended. When one was killed or failed, the others get `after_death`;
        after `seconds` all are killed."""
        ends = time.monotonic() + seconds
        while running := self.poll():
            if any(self.statuses.values()):
                ends = min(ends, time.monotonic() + after_death)
            if time.monotonic() > ends:
                for rank in running:
                    self.kill(rank)
                ends = time.monotonic() + 5
            time.sleep(0.005)
        return self.statuses
