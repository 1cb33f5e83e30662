"""This process's watch over its own waits: what it does and waits for is published on a board, and
a thread looks at what it waits for.

Under `plait launch` and `plait train` the launcher reads the boards and ends a run that hangs
(`cli.launching.watch`). Under another launcher, such as torchrun, the thread reads the boards of
the ranks on this machine itself: it prints who is late, and a rank that waits on although its
collective should have given up is ended. Nothing alarms before a wait has taken the timeout of the
process group.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from plait._torch.flight import Begun, begun_collectives
from plait._torch.groups import set_timeout, timeout_of
from plait._torch.unit_order import last_collective
from plait.cluster.ending import end_process
from plait.cluster.fake_group import is_fake
from plait.cluster.layout import EXPERT_AXES
from plait.cluster.mesh import Mesh
from plait.cluster.topology import watch_folder
from plait.comm import hang, stacks
from plait.comm.board import Board, Reading, Wait, read
from plait.files import anonymous_file

LOOK_SECONDS = 0.5
LATER_SECONDS = 10.0
LATER_ALONE_SECONDS = 4.0
"""Collectives give up so much later than the timeout, under a launcher that watches and without
one, so that what sees all ranks is first. A rank whose collective did not give up by itself is
ended later still.
"""
_UNSEEN_SECONDS = 1.0
"""A wait is looked at when it is older."""
_STACK_SECONDS = 2.0
_MOST_STACKS = 2


@dataclass(frozen=True)
class _Peer:
    """Another rank on this machine."""

    board: Path
    stack: Path


class Watch:
    """There is one in a process, `WATCH`: it has one main thread."""

    def __init__(self) -> None:
        self.board: Board | None = None
        """None while nothing is watched: a process alone waits for nobody."""
        self.found = ""
        """What the last hang was, for the error of the collective that gives up."""
        self._group: dist.ProcessGroup | None = None
        self._peers: dict[int, _Peer] = {}
        self._axes: dict[str, str] = {}
        self._launcher_watches = False
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: tuple[float, tuple[Wait, ...], str] = (0.0, (), "")
        self._looked = 0.0
        self._begun: dict[Begun, float] = {}
        """When what torch's recorder has seen began, by the monotonic clock."""
        self._reported = False

    def progress(self, step: int, phase: int) -> None:
        """A phase of a step begins."""
        if self.board is not None:
            self.board.progress(step, phase)

    def phase(self, phase: int) -> None:
        """A phase of the same step begins."""
        if self.board is not None:
            self.board.phase(phase)

    @contextmanager
    def during(self, phase: int) -> Iterator[None]:
        """A phase inside of another, which goes on afterwards."""
        if self.board is None:
            yield
            return
        step, before, _ = self.board.now
        self.board.phase(phase)
        try:
            yield
        finally:
            self.board.progress(step, before)

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """Around a wait that torch does not know of."""
        if self.board is None:
            yield
            return
        self.board.wait(wait)
        try:
            yield
        finally:
            self.board.waited()

    def again(self, wait: Wait) -> None:
        """Inside of `waiting`: it has changed."""
        if self.board is not None:
            self.board.wait(wait)

    def arm(self) -> None:
        """Watch the waits of the default group's ranks from now on. Collective, once a default
        group; nothing for one rank, or a fake group.
        """
        group = dist.group.WORLD
        if group is None or group is self._group or group.size() == 1 or is_fake():
            return
        self.disarm()
        self._group, timeout, folder = group, timeout_of(group), watch_folder()
        self._launcher_watches = folder is not None
        path = folder / f"{os.getpid()}.board" if folder is not None else None
        self.board = Board(rank=group.rank(), timeout_seconds=timeout, path=path)
        if not self._launcher_watches:
            self._peers = self._meet(group)
        set_timeout(
            group, timeout + (LATER_SECONDS if self._launcher_watches else LATER_ALONE_SECONDS)
        )
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._run, args=(self._stop, self.board), name="plait-watch", daemon=True
        )
        self._thread.start()
        atexit.register(self.disarm)

    def name_axes(self, mesh: Mesh) -> None:
        """The groups along the axes of a mesh have the axes' names from now on."""
        for axis in mesh.device_mesh.mesh_dim_names or ():
            group = mesh.group(axis)
            if group is not None:
                self._axes[group.group_name] = (
                    f"all ranks ({axis})" if group is dist.group.WORLD else axis
                )
        for axis in EXPERT_AXES if mesh.expert_mesh is not None else ():
            group = mesh.group(axis)
            if group is not None:
                self._axes.setdefault(group.group_name, axis)

    def name_group(self, group: dist.ProcessGroup | None, name: str) -> None:
        """Set the name of a group's collectives in messages. Does nothing if `group` is None."""
        if group is not None:
            self._axes[group.group_name] = name

    def _meet(self, group: dist.ProcessGroup) -> dict[int, _Peer]:
        """The other ranks on this machine. Collective."""
        assert self.board is not None
        stack = anonymous_file("plait-stacks")
        faulthandler.register(stacks.SIGNAL, file=stack, all_threads=True)
        mine = (stacks.machine(), str(self.board.path), f"/proc/{os.getpid()}/fd/{stack}")
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, mine)
        return {
            rank: _Peer(Path(board), Path(seen))
            for rank, (machine, board, seen) in enumerate(everyone)
            if machine == mine[0]
        }

    def disarm(self) -> None:
        """Watch no more; before the interpreter ends, which its threads must not outlive."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread, self._stop = None, threading.Event()
            atexit.unregister(self.disarm)
        if self.board is not None:
            self.board.close()
        self.board = None
        self._group = None
        self._peers = {}
        self.found = ""
        self._reported = False
        self._begun = {}

    def _run(self, stop: threading.Event, board: Board) -> None:
        while not stop.wait(LOOK_SECONDS):
            self.look(board)

    def look(self, board: Board) -> None:
        """Publish what this process waits for, and without a launcher that does so look for a
        hang.
        """
        now = time.monotonic()
        _, _, since = board.now
        if now - since < _UNSEEN_SECONDS and not board.waiting_since:
            board.sign()
            return
        reading = self._publish(board, now, since)
        overdue = any(now - wait.since >= board.timeout_seconds for wait in reading)
        if not overdue:
            return
        if not self._launcher_watches and not self._reported:
            self._report(now)
        if any(now - wait.since >= board.timeout_seconds + 2 * LATER_SECONDS for wait in reading):
            _say(
                f"process {os.getpid()} has waited {2 * LATER_SECONDS:g} s longer than its timeout,"
                " and ends itself"
            )
            end_process(5)  # the exit code of a CommunicationError

    def _publish(self, board: Board, now: float, since: float) -> list[Wait]:
        """The waits of this process, also on its board. torch's record of them is read once in a
        while, and often near a deadline.
        """
        phase, waits, line = self._seen
        oldest = max((now - wait.since for wait in waits), default=0.0)
        near = (
            oldest > board.timeout_seconds - 2 * LATER_SECONDS
            or board.timeout_seconds < 6 * LATER_SECONDS
        )
        if phase != since or near or now - self._looked > board.timeout_seconds / 60:
            self._begun = self._since(begun_collectives(), after=self._looked)
            self._looked = now
            old = [
                (one, began) for one, began in self._begun.items() if now - began >= _UNSEEN_SECONDS
            ]
            waits = tuple(
                Wait(
                    operation=one.operation.replace("_", "-"),
                    axis=self._axes.get(one.group) or _axis(one.description, one.group),
                    since=began,
                    sequence=one.sequence,
                    shape=one.shapes,
                    members=one.ranks,
                )
                for one, began in old[:8]
            )
            line = self._line()
            self._seen = (since, waits, line)
        board.sign(waits, line=line, seen=self._looked)
        waiting = board.waiting_since  # read once: the main thread takes it down at any time
        return [*waits, *([Wait("", "", waiting)] if waiting else [])]

    def _since(self, begun: Sequence[Begun], *, after: float) -> dict[Begun, float]:
        """When each began, by the monotonic clock. The recorder tells by the other clock, which may
        be set while a collective waits: one that is seen again keeps its time, and one that is new
        began `after` the last look.
        """
        now = time.monotonic()
        wall = time.time()
        return {
            one: self._begun.get(one) or min(now, max(one.time_ns / 1e9 - wall + now, after))
            for one in begun
        }

    def _line(self) -> str:
        frame = sys._current_frames().get(self._main or 0)
        if frame is None:
            return ""
        unit = last_collective()
        return users_line(frame) + (f", after the {unit} began" if unit else "")

    def _report(self, now: float) -> None:
        readings: dict[int, Reading] = {}
        for rank, peer in self._peers.items():
            reading = read(peer.board)
            if reading is not None and reading.rank == rank:
                readings[rank] = reading
        found = hang.find(readings, now)
        if found is None:
            return
        self._reported = True
        ended = [
            rank
            for rank, reading in readings.items()
            if stacks.state(reading.process) in stacks.ENDED
        ]
        self.found = hang.cause(found, readings, ended=ended)
        if min(one.rank for one in found.waiting) != dist.get_rank():
            return  # one of those that wait says it
        _say(self.found)
        folder = stacks.new_folder()
        for rank in found.suspects[:_MOST_STACKS]:
            if rank in readings:
                state = stacks.state(readings[rank].process)
                kept = stacks.collect(
                    readings[rank].process,
                    self._peers[rank].stack,
                    folder / f"rank-{rank}.txt",
                    _STACK_SECONDS,
                )
                _say(
                    hang.condition(
                        readings[rank],
                        now,
                        state=state,
                        line=stacks.users_line(kept),
                        stack=str(kept or ""),
                    )
                )


def _say(text: str) -> None:
    # not through sys.stderr, whose lock the main thread may hold
    os.write(2, f"plait: {text}\n".encode())


def _axis(description: str, group: str) -> str:
    """`dp_shard` of torch's `mesh_dp_shard`."""
    if description == "default_pg":
        return "all ranks"
    return (
        f"group {group}" if description in ("", "undefined") else description.removeprefix("mesh_")
    )


def users_line(frame: FrameType) -> str:
    """`train.py:33`: the innermost line of the user's own code, else of any."""
    innermost = frame
    at = frame.f_back
    if stacks.is_users(innermost.f_code.co_filename):
        return f"{innermost.f_code.co_filename}:{innermost.f_lineno}"
    while at is not None:
        if stacks.is_users(at.f_code.co_filename):
            return f"{at.f_code.co_filename}:{at.f_lineno}"
        at = at.f_back
    return f"{innermost.f_code.co_filename}:{innermost.f_lineno}"


WATCH = Watch()
"""This process's. It is as global as the process's main thread."""

# A child shares the board's memory, and must not write to it.
os.register_at_fork(after_in_child=lambda: setattr(WATCH, "board", None))
