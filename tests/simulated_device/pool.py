"""A pool like that of `tests.pool`, whose workers have simulated GPUs and NCCL.

Races and deadlocks fail a task.
"""

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
"""Longest time of a task."""
DEVICES = 8
SLACK = 60
"""Seconds to start or kill the workers."""


class Races(WorkerFailed):
    """Unordered streams, or a stream and the host, accessed the same memory."""


class Deadlock(WorkerFailed):
    """NCCL would not end."""


@dataclass(frozen=True)
class Record:
    """Devices and races of a task."""

    devices: int
    races: int


RECORDS: list[Record] = []
"""Records of the tasks of all pools, which a fixture clears."""


class SimulatedPool:
    """Pool that is started when it is first needed, and again after a failure."""

    def __init__(self, **variables):
        """Create a pool whose workers have some environment variables."""
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(self, world_size, function, *args):
        """Run `function(rank, world_size, *args)` on every rank, and return the results by rank.

        Raises:
            WorkerFailed: A rank raised an error.
            Races: Two accesses to the same memory were not ordered.
            Deadlock: NCCL would not end.
        """
        return [seen.value for seen in self.watch(world_size, function, *args)]

    def watch(self, world_size, function, *args):
        """Run a function as `run` does, and return the observations of every rank."""
        results = self.ask(world_size, function, *args)
        judge(results)
        return results

    def ask(self, world_size, function, *args):
        """Run a function and return the observations, without errors for races and deadlocks."""
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send_bytes(pickle.dumps((world_size, function, args, SECONDS)))
            if not self._connection.poll(SECONDS + SLACK):
                self.close()
                raise WorkerFailed(f"no answer within {SECONDS + SLACK} s")
            answered, results = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):  # its output has the reason
            self.close()
            raise WorkerFailed("the process that starts the workers has ended") from None
        if not answered:
            raise WorkerFailed(results)
        RECORDS.append(Record(world_size, sum(len(seen.races) for seen in results)))
        return results

    def _start(self):
        self._connection, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.simulated_device.host", str(number)],
                env={**environment(devices=DEVICES), **self._variables},
                cwd=ROOT,
                pass_fds=[number],
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


def judge(results):
    """Raise an error for deadlocks, failures and races. A deadlock explains failures."""
    waiting = stuck([seen.journal for seen in results])
    failed = [f"rank {rank}:\n{seen.failed}" for rank, seen in enumerate(results) if seen.failed]
    if waiting:
        raise Deadlock("\n".join([waiting, *failed]))
    if failed:
        raise WorkerFailed("\n".join(failed))
    races = Counter(
        f"rank {rank}: {race}" for rank, seen in enumerate(results) for race in seen.races
    )
    if races:
        raise Races("\n".join(f"{count} x {race}" for race, count in races.most_common(20)))
