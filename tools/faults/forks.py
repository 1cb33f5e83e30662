"""Ranks as forks of a process that has imported torch: two ranks start in half a second."""

import importlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.workers import free_port

LOADED = (
    *("plait", "plait.engine.build", "plait.train.session", "plait.cli.main"),
    *("torch._dynamo", "torch.distributed.fsdp"),
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
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())

    def read(self, event: str | None = None) -> list[list[Any]]:
        if not self.path.exists():
            return []
        notes = map(json.loads, self.path.read_text().splitlines())
        return [note for note in notes if event in (None, note[0])]


def broken(promises: Mapping[str, bool]) -> list[str]:
    """Return the descriptions of promises that do not hold."""
    return [text for text, holds in promises.items() if not holds]


def in_process(function: Callable[..., Any], *args: Any, folder: Path) -> Any:
    """Return what `function` returns, as JSON, from a process that may start threads and groups."""
    answer = folder / f"answer-{function.__name__}"

    def work(_: int) -> None:
        answer.write_text(json.dumps(function(*args)))

    if any(Ranks(work, 1, log=folder / "log").wait(3600)):
        raise SystemExit((folder / "log").read_text()[-3000:])
    return json.loads(answer.read_text())


class Ranks:
    """The processes of one run. Each calls `function(rank, *args)` and prints to `log`."""

    def __init__(
        self,
        function: Callable[..., None],
        world: int,
        *args: Any,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        variables |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        variables |= environment or {}
        context = multiprocessing.get_context("fork")
        self._processes = []
        for rank in range(world):
            process = context.Process(target=_work, args=(function, rank, args, log, variables))
            process.start()
            self._processes.append(process)

    def running(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process.is_alive()]

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()

    def wait(self, seconds: float) -> list[int]:
        """Wait until all ranks have ended, and return their exit codes.

        The code of a rank that a signal ended is negative. All ranks are killed after `seconds`, or
        `GRACE_SECONDS` after the first failure.
        """
        deadline = time.monotonic() + seconds
        while running := self.running():
            if any(process.exitcode for process in self._processes):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > deadline:
                for rank in running:
                    self.kill(rank)
            time.sleep(0.005)
        return [process.exitcode or 0 for process in self._processes]


def _work(
    function: Callable[..., None], rank: int, args: Any, log: Path, variables: Mapping[str, str]
) -> None:
    os.setpgid(0, 0)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(variables)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    function(rank, *args)
