"""A pool like that of `tests.pool`, whose workers have simulated GPUs and NCCL. A task fails where something raced or would deadlock."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from tests.pool import WorkerFailed
from tests.simulated_device.build import ROOT, environment
from tests.simulated_device.deadlocks import stuck

SECONDS = 240
"""That a task may take."""
DEVICES = 8
SLACK = 60
"""Seconds in which the workers are started or killed."""


class Races(WorkerFailed):
    """Streams, or the host, touched the same memory without an order."""


class Deadlock(WorkerFailed):
    """NCCL would not end."""


@dataclass(frozen=True)
class Record:
    """Of one task."""

    devices: int
    races: int


RECORDS: list[Record] = []
"""Of every task of all pools, until somebody clears it."""


class SimulatedPool:
    """Started when first needed, and anew after a failure."""

    def __init__(self, **variables):
        """`variables` of the workers' environment."""
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(self, world_size, function, *args):
        """`function(rank, world_size, *args)` in every worker: results by rank. Raises WorkerFailed, Races and Deadlock."""
        return [seen.value for seen in self.watch(world_size, function, *args)]

    def watch(self, world_size, function, *args):
        """The same, with everything that was seen."""
        found = self.ask(world_size, function, *args)
        judge(found)
        return found

    def ask(self, world_size, function, *args):
        """The same, not judged."""
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send_bytes(pickle.dumps((world_size, function, args, SECONDS)))
            if not self._connection.poll(SECONDS + SLACK):
                self.close()
                raise WorkerFailed(f"no answer within {SECONDS + SLACK} s")
            answered, found = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):  # it says why in its own output
            self.close()
            raise WorkerFailed("the process that starts the workers has ended") from None
        if not answered:
            raise WorkerFailed(found)
        RECORDS.append(Record(world_size, sum(len(seen.races) for seen in found)))
        return found

    def _start(self):
        self._connection, theirs = Pipe()
        command, variables = (
            [sys.executable, "-m", "tests.simulated_device.host"],
            {**environment(devices=DEVICES), **self._variables},
        )
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [*command, str(number)], env=variables, cwd=ROOT, pass_fds=[number]
            )

    def close(self):
        """End all processes."""
        if self._connection is not None and self._process is not None:
            self._connection.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._connection = self._process = None


def judge(found):
    """Raise what is wrong; a deadlock first, which explains what failed."""
    waiting = stuck([seen.journal for seen in found])
    failed = [f"rank {rank}:\n{seen.failed}" for rank, seen in enumerate(found) if seen.failed]
    if waiting:
        raise Deadlock("\n".join([waiting, *failed]))
    if failed:
        raise WorkerFailed("\n".join(failed))
    races = Counter(
        f"rank {rank}: {race}" for rank, seen in enumerate(found) for race in seen.races
    )
    if races:
        raise Races("\n".join(f"{count} x {race}" for race, count in races.most_common(20)))
