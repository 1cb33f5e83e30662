"""How much of the processor other programs used while we measured.

The share of foreign work is the time that the machine was busy (with time that the hypervisor gave
away) minus the time of our processes, over wall time times cores.
"""

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.common.workers import WorkerGroup


def busy_seconds() -> float:
    """Return the processor seconds since boot, over all cores, that were not idle."""
    times = psutil.cpu_times()
    # The kernel counts the time of a guest in `user` too.
    idle = ("idle", "iowait", "guest", "guest_nice")
    return float(sum(times)) - sum(getattr(times, name, 0.0) for name in idle)


def own_seconds(pids: Iterable[int]) -> float:
    """Return the processor seconds that these processes have used, with all threads."""
    seconds = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        seconds += times.user + times.system
    return seconds


@dataclass
class ForeignMeter:
    """Measures the foreign share between `start` and `stop`.

    The kernel counts in hundredths of a second, which is coarse for less than half a second.
    """

    pids: tuple[int, ...]
    _wall: float = 0.0
    _foreign: float = 0.0

    def start(self) -> None:
        self._wall = time.perf_counter()
        self._foreign = busy_seconds() - own_seconds(self.pids)

    def stop(self) -> float:
        """Return the foreign share since `start`, from 0 to 1."""
        wall = time.perf_counter() - self._wall
        foreign = busy_seconds() - own_seconds(self.pids) - self._foreign
        return max(0.0, foreign) / (wall * (psutil.cpu_count() or 1))


def undisturbed(
    group: WorkerGroup,
    message: Any,
    *,
    share: float,
    repeats: int,
    wait_seconds: float,
    timeout_seconds: float,
) -> Iterator[tuple[float, list[Any]]]:
    """Ask a group until a turn is undisturbed. Yield the foreign share and answers of each turn.

    Args:
        group: Workers that are asked.
        message: What they are asked.
        share: Largest foreign share of an undisturbed turn.
        repeats: Turns after the first.
        wait_seconds: Longest wait for a quiet machine before a turn.
        timeout_seconds: Longest turn.
    """
    for _ in range(1 + repeats):
        wait_for_quiet(share=share, longest_seconds=wait_seconds)
        meter = ForeignMeter((*group.pids, os.getpid()))
        meter.start()
        answers = group.ask(message, timeout_seconds=timeout_seconds)
        foreign = meter.stop()
        yield foreign, answers
        if foreign <= share:
            return


def wait_for_quiet(*, share: float, longest_seconds: float, window_seconds: float = 0.5) -> bool:
    """Wait until the machine is busy for at most `share` of a window. False after the limit."""
    deadline = time.perf_counter() + longest_seconds
    cores = psutil.cpu_count() or 1
    while share < 1:
        wall = time.perf_counter()
        busy = busy_seconds()
        time.sleep(window_seconds)
        if (busy_seconds() - busy) / ((time.perf_counter() - wall) * cores) <= share:
            return True
        if time.perf_counter() > deadline:
            return False
    return True
