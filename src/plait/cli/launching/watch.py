"""The launcher's look at the waits of its ranks: finds a hang, names the rank that is late with its
stack, before any rank gives up.

A rank publishes on its board what it does and waits for (`comm.board`), and writes its stacks when
it is sent a signal. Both work while the rank is stopped or holds the interpreter's lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from plait.cluster.topology import WATCH_FOLDER
from plait.comm import hang, stacks
from plait.comm.board import Reading, read

LOOK_SECONDS = 0.5
STACK_SECONDS = 2.0
STACK_SIGNAL = "PLAIT_STACK_SIGNAL"
"""Tells `worker` which signal asks for stacks."""


def environment(folder: Path) -> dict[str, str]:
    """What the ranks need to take part. `folder`: for boards and stacks, gone with the launch."""
    return {WATCH_FOLDER: str(folder), STACK_SIGNAL: str(int(stacks.SIGNAL))}


class RankWatch:
    """Of the ranks of one launch on this machine."""

    def __init__(self, folder: Path, *, kept: Path | None, tell: Callable[[str], None]) -> None:
        """`folder`: see `environment`. `kept`: where the stacks of a hang stay."""
        self._folder = folder
        self._kept = kept
        self._tell = tell
        self._looked = 0.0

    def hangs(self, processes: Mapping[int, int]) -> bool:
        """Whether a rank has waited longer than it may; if so that was told. `processes`: by rank,
        of this machine, ended ones too.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return False
        self._looked = now
        readings = self._read(processes)
        found = hang.find(readings, now)
        if found is None:
            return False
        states = {
            rank: stacks.state(processes[rank]) for rank in found.suspects if rank in readings
        }
        ended = [rank for rank, state in states.items() if state in stacks.ENDED]
        self._tell(f"plait: {hang.cause(found, readings, ended=ended)}")
        folder = self._kept or stacks.new_folder()
        for rank, state in states.items():
            kept = None
            if state not in stacks.ENDED:
                written = self._folder / f"{processes[rank]}.stack"
                kept = stacks.collect(
                    processes[rank], written, folder / f"rank-{rank}.txt", STACK_SECONDS
                )
            line = stacks.users_line(kept)
            condition = hang.condition(
                readings[rank], now, state=state, line=line, stack=str(kept or "")
            )
            self._tell(f"plait: {condition}")
        return True

    def _read(self, processes: Mapping[int, int]) -> dict[int, Reading]:
        found = {}
        for rank, process in processes.items():
            reading = read(self._folder / f"{process}.board")
            if reading is not None and reading.process == process:
                found[rank] = (
                    replace(reading, waits=()) if stacks.state(process) in stacks.ENDED else reading
                )
        return found
