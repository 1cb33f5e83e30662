"""Who else used the processor while we measured.

A ratio taken on a shared machine means little without it. The share of foreign work is what the whole machine was busy with (other
processes, and time the hypervisor gave away) less what our own processes used, over wall time times cores.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil


def busy_seconds() -> float:
    """Processor seconds, over all cores, that were not idle since boot. Stolen time counts: it was not ours."""
    times = psutil.cpu_times()
    # The kernel counts a guest's time in `user` as well.
    return float(sum(times)) - sum(
        getattr(times, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice")
    )


def own_seconds(pids: Iterable[int]) -> float:
    """Processor seconds used by these processes so far, threads included."""
    used = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        used += times.user + times.system
    return used


@dataclass
class ForeignMeter:
    """Measures the foreign share between `start` and `stop`.

    The kernel counts in hundredths of a second, so intervals below about half a second read coarsely.
    """

    pids: tuple[int, ...]
    _wall: float = 0.0
    _busy: float = 0.0
    _own: float = 0.0

    def start(self) -> None:
        """Take the first reading."""
        self._wall, self._busy, self._own = (
            time.perf_counter(),
            busy_seconds(),
            own_seconds(self.pids),
        )

    def stop(self) -> float:
        """The foreign share since `start`: 0 is a machine of our own, 1 is every core taken by others."""
        wall = time.perf_counter() - self._wall
        foreign = (busy_seconds() - self._busy) - (own_seconds(self.pids) - self._own)
        return max(0.0, foreign) / (wall * (psutil.cpu_count() or 1))


def wait_for_quiet(*, share: float, longest_seconds: float, window_seconds: float = 0.5) -> bool:
    """Sleep until the machine is busy less than `share` of a window. False where that did not happen in `longest_seconds`."""
    deadline = time.perf_counter() + longest_seconds
    cores = psutil.cpu_count() or 1
    while True:
        wall, busy = time.perf_counter(), busy_seconds()
        time.sleep(window_seconds)
        if (busy_seconds() - busy) / ((time.perf_counter() - wall) * cores) <= share:
            return True
        if time.perf_counter() > deadline:
            return False
