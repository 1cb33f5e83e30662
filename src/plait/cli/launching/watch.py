"""Detection of hangs by the launcher, which names the late rank with its stack.

A rank publishes on its board which operation it runs or waits for (`comm.board`), and writes its
stacks after a signal. Both work while the rank is stopped or holds the GIL. The launcher reports a
hang before any rank reaches its own timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from plait.cluster.topology import WATCH_FOLDER
from plait.comm import hang, stacks
from plait.comm.board import BoardContent, read_board

POLL_SECONDS = 0.5
STACK_SECONDS = 2.0
"""Time that a rank gets to write its stacks."""
STACK_SIGNAL = "PLAIT_STACK_SIGNAL"
"""Variable that tells `worker` which signal requests the stacks."""


def environment(folder: Path) -> dict[str, str]:
    """Return the variables by which ranks take part.

    Args:
        folder: Folder for boards and stacks, which is removed with the launch.
    """
    return {WATCH_FOLDER: str(folder), STACK_SIGNAL: str(int(stacks.SIGNAL))}


class RankWatch:
    """Watch over the ranks of one launch on this machine."""

    def __init__(
        self, folder: Path, *, stack_folder: Path | None, emit: Callable[[str], None]
    ) -> None:
        """Watch the ranks that have the variables of `environment(folder)`.

        Args:
            folder: Folder of boards and stacks.
            stack_folder: Folder in which the stacks of a hang are kept. None for a new one.
            emit: Receives the lines of a report.
        """
        self._folder = folder
        self._stack_folder = stack_folder
        self._emit = emit
        self._last_poll = 0.0

    def hangs(self, processes: Mapping[int, int]) -> bool:
        """Return True if a rank has waited longer than its timeout, after reporting it.

        Args:
            processes: Process ids by rank of this machine, including those that have ended.
        """
        now = time.monotonic()
        if now - self._last_poll < POLL_SECONDS:
            return False
        self._last_poll = now
        readings = self._read_boards(processes)
        detected = hang.find_hang(readings, now)
        if detected is None:
            return False

        states = {
            rank: stacks.state(processes[rank]) for rank in detected.suspects if rank in readings
        }
        ended = [rank for rank, state in states.items() if state in stacks.ENDED]
        self._emit(f"plait: {hang.describe_cause(detected, readings, ended=ended)}")
        folder = self._stack_folder or stacks.new_folder()
        for rank, state in states.items():
            stack = None
            if state not in stacks.ENDED:
                process = processes[rank]
                source = self._folder / f"{process}.stack"
                stack = stacks.collect(process, source, folder / f"rank-{rank}.txt", STACK_SECONDS)
            condition = hang.condition(
                readings[rank],
                now,
                state=state,
                line=stacks.users_line(stack),
                stack=str(stack or ""),
            )
            self._emit(f"plait: {condition}")
        return True

    def _read_boards(self, processes: Mapping[int, int]) -> dict[int, BoardContent]:
        readings = {}
        for rank, process in processes.items():
            reading = read_board(self._folder / f"{process}.board")
            # A board of another process remains from an earlier attempt.
            if reading is None or reading.process != process:
                continue
            if stacks.state(process) in stacks.ENDED:
                reading = replace(reading, waits=())
            readings[rank] = reading
        return readings
