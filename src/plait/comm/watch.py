"""Watchdog that detects hangs: it observes how long this process waits for other ranks.

The process publishes its progress and its waits on a board (`comm.hang.Board`). A thread observes
the collectives that torch records.

Under `plait launch` and `plait train` the launcher reads the boards and ends a run that hangs
(`cli.launching.failures`). Under other launchers, such as torchrun, the thread reads the boards of
the ranks on this machine. The thread prints which rank is late, and ends this process if torch does
not end the collective that hangs. Nothing is reported before a wait has reached the timeout of the
process group.

Note [Order of timeouts]
    A process that reads the boards should report a hang before torch does, because torch cannot
    name the late rank. `arm` therefore extends the timeout of torch's collectives by LATER_SECONDS
    if a launcher watches, and by LATER_ALONE_SECONDS otherwise. If torch does not end the
    collective of a rank even then, the rank ends itself 2 x LATER_SECONDS after the original
    timeout.
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

import torch.distributed as dist

from plait._torch.groups import (
    UnfinishedCollective,
    set_timeout,
    timeout_of,
    unfinished_collectives,
)
from plait._torch.unit_order import last_collective
from plait.cluster.layout import EXPERT_AXES
from plait.cluster.mesh import Mesh
from plait.cluster.process_groups import end_process, is_fake
from plait.cluster.small_messages import all_gather_objects
from plait.cluster.topology import watch_folder
from plait.comm import hang, stacks
from plait.comm.hang import Board, BoardContent, Wait, read_board
from plait.files import anonymous_file

LOOK_SECONDS = 0.5
"""Interval at which the thread observes this process."""
LATER_SECONDS = 10.0
"""Extension of the collectives' timeout if a launcher watches, see Note [Order of timeouts]."""
LATER_ALONE_SECONDS = 4.0
"""Extension of the collectives' timeout if no launcher watches, see Note [Order of timeouts]."""
_UNSEEN_SECONDS = 1.0
"""Age up to which a wait is ignored."""
_STACK_SECONDS = 2.0
"""Longest time to wait for a process to write its stacks."""
_MOST_STACKS = 2
"""Largest number of late ranks whose stacks are collected."""
_MOST_WAITS = 8
"""Largest number of waits that are published."""
_EXIT_CODE = 5
"""Exit code of a process that ends itself: the one of a CommunicationError."""


class Watch:
    """Watchdog of one process. `WATCH` is the only instance outside tests.

    Attributes:
        board: Board of the process, or None while the watchdog is off. A single process has
            none, because it does not wait for other ranks.
        hang_cause: Cause of the last hang, for the error of a collective that times out.
    """

    def __init__(self) -> None:
        self.board: Board | None = None
        self.hang_cause = ""
        self._group: dist.ProcessGroup | None = None
        self._peers: dict[int, _Peer] = {}
        self._axes: dict[str, str] = {}
        """Names of groups for messages, by torch's names of the groups."""
        self._launcher_watches = False
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._observed: tuple[float, tuple[Wait, ...], str] = (0.0, (), "")
        """Start of the phase, waits and line of the last observation."""
        self._looked = 0.0
        """Time at which torch's recorder was last read."""
        self._unfinished: dict[UnfinishedCollective, float] = {}
        """Start time of each unfinished collective, by the monotonic clock."""
        self._reported = False

    def progress(self, step: int, phase: int) -> None:
        """Record the start of a phase of a step."""
        if self.board is not None:
            self.board.progress(step, phase)

    def phase(self, phase: int) -> None:
        """Record the start of another phase of the same step."""
        if self.board is not None:
            self.board.phase(phase)

    @contextmanager
    def during(self, phase: int) -> Iterator[None]:
        """Record another phase during a `with` block, and the current phase again after it."""
        if self.board is None:
            yield
            return
        step, outer_phase, _ = self.board.now
        self.board.phase(phase)
        try:
            yield
        finally:
            self.board.progress(step, outer_phase)

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """Publish a wait that torch does not record, during a `with` block."""
        if self.board is None:
            yield
            return
        self.board.wait(wait)
        try:
            yield
        finally:
            self.board.waited()

    def update_wait(self, wait: Wait) -> None:
        """Replace the published wait. Call this inside `waiting`."""
        if self.board is not None:
            self.board.wait(wait)

    def arm(self) -> None:
        """Start watching the waits of the default group's ranks. Collective.

        This does nothing if the default group has a single rank, is a fake group, or is watched
        already.
        """
        group = dist.group.WORLD
        if group is None or group is self._group or group.size() == 1 or is_fake():
            return
        self.disarm()
        timeout = timeout_of(group)
        folder = watch_folder()
        self._group = group
        self._launcher_watches = folder is not None
        path = None
        extension = LATER_ALONE_SECONDS
        if folder is not None:
            path = folder / f"{os.getpid()}.board"
            extension = LATER_SECONDS
        self.board = Board(rank=group.rank(), timeout_seconds=timeout, path=path)
        if not self._launcher_watches:
            self._peers = self._find_peers(group)
        # See Note [Order of timeouts].
        set_timeout(group, timeout + extension)

        self._stop.clear()
        self._thread = threading.Thread(
            target=self._run, args=(self._stop, self.board), name="plait-watch", daemon=True
        )
        self._thread.start()
        atexit.register(self.disarm)

    def name_axes(self, mesh: Mesh) -> None:
        """Use the names of a mesh's dimensions as names of its groups in messages."""
        for axis in mesh.device_mesh.mesh_dim_names or ():
            group = mesh.group(axis)
            if group is not None:
                is_world = group is dist.group.WORLD
                self._axes[group.group_name] = f"all ranks ({axis})" if is_world else axis

        if mesh.expert_mesh is None:
            return
        for axis in EXPERT_AXES:
            group = mesh.group(axis)
            if group is not None:
                self._axes.setdefault(group.group_name, axis)

    def name_group(self, group: dist.ProcessGroup | None, name: str) -> None:
        """Set the name of a group in messages. Without a group this does nothing."""
        if group is not None:
            self._axes[group.group_name] = name

    def _find_peers(self, group: dist.ProcessGroup) -> dict[int, _Peer]:
        """Return the ranks on this machine, this one included. Collective."""
        assert self.board is not None
        # Other processes open the files of this one through /proc, so they need no names.
        stack = anonymous_file("plait-stacks")
        faulthandler.register(stacks.SIGNAL, file=stack, all_threads=True)
        this_rank = (stacks.machine(), str(self.board.path), f"/proc/{os.getpid()}/fd/{stack}")
        peers: dict[int, _Peer] = {}
        for rank, (machine, board_path, stack_path) in enumerate(
            all_gather_objects(this_rank, group)
        ):
            if machine == this_rank[0]:
                peers[rank] = _Peer(Path(board_path), Path(stack_path))
        return peers

    def disarm(self) -> None:
        """Stop watching, and end the thread. Call this before the interpreter ends."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            self._stop = threading.Event()
            atexit.unregister(self.disarm)
        if self.board is not None:
            self.board.close()
        self.board = None
        self._group = None
        self._peers = {}
        self.hang_cause = ""
        self._reported = False
        self._unfinished = {}

    def _run(self, stop: threading.Event, board: Board) -> None:
        while not stop.wait(LOOK_SECONDS):
            self.look(board)

    def look(self, board: Board) -> None:
        """Publish the waits of this process. Report a hang, if no launcher does."""
        now = time.monotonic()
        _, _, since = board.now
        if now - since < _UNSEEN_SECONDS and not board.waiting_since:
            # The process makes progress.
            board.heartbeat()
            return

        waits = self._publish(board, now, since)
        longest = max((now - wait.since for wait in waits), default=0.0)
        if longest < board.timeout_seconds:
            return
        if not self._launcher_watches and not self._reported:
            self._report(now)
        if longest >= board.timeout_seconds + 2 * LATER_SECONDS:
            _print(
                f"process {os.getpid()} has waited {2 * LATER_SECONDS:g} s longer than its timeout"
                " and ends now"
            )
            end_process(_EXIT_CODE)

    def _publish(self, board: Board, now: float, since: float) -> list[Wait]:
        """Publish the waits of this process on its board, and return them.

        Args:
            board: Board of the process.
            now: Time of the monotonic clock.
            since: Time at which the phase began.
        """
        phase_start, waits, line = self._observed
        # Reading torch's recorder takes time. It is read rarely, and at every look near a deadline.
        oldest = max((now - wait.since for wait in waits), default=0.0)
        is_near_deadline = (
            oldest > board.timeout_seconds - 2 * LATER_SECONDS
            or board.timeout_seconds < 6 * LATER_SECONDS
        )
        is_old = now - self._looked > board.timeout_seconds / 60
        if phase_start != since or is_near_deadline or is_old:
            self._unfinished = self._starts(unfinished_collectives(), after=self._looked)
            self._looked = now
            waits = self._recorded_waits(now)
            line = self._line()
            self._observed = (since, waits, line)
        board.heartbeat(waits, line=line, seen=self._looked)

        # Read once, because the main thread may remove its wait at any time.
        waiting_since = board.waiting_since
        if waiting_since:
            return [*waits, Wait("", "", waiting_since)]
        return list(waits)

    def _recorded_waits(self, now: float) -> tuple[Wait, ...]:
        """Return the unfinished collectives that are older than `_UNSEEN_SECONDS`."""
        waits = []
        for collective, start in self._unfinished.items():
            if now - start >= _UNSEEN_SECONDS:
                waits.append(
                    Wait(
                        operation=collective.operation.replace("_", "-"),
                        axis=self._axes.get(collective.group)
                        or group_label(collective.description, collective.group),
                        since=start,
                        sequence=collective.sequence,
                        shape=collective.shapes,
                        members=collective.ranks,
                    )
                )
        return tuple(waits[:_MOST_WAITS])

    def _starts(
        self, collectives: Sequence[UnfinishedCollective], *, after: float
    ) -> dict[UnfinishedCollective, float]:
        """Return the start time of each collective by the monotonic clock.

        torch's recorder uses the system clock, which may be adjusted while a collective waits. A
        collective that was observed before therefore keeps its start time. Any other collective has
        started after the last observation.

        Args:
            collectives: Unfinished collectives of this process.
            after: Time of the last observation.
        """
        now = time.monotonic()
        system_now = time.time()
        starts = {}
        for collective in collectives:
            start = self._unfinished.get(collective)
            if not start:
                age = system_now - collective.time_ns / 1e9
                start = min(now, max(now - age, after))
            starts[collective] = start
        return starts

    def _line(self) -> str:
        """Return a text with the main thread's line of user code.

        The text also names the last collective of `fully_shard`, if there is one.
        """
        frame = sys._current_frames().get(self._main or 0)
        if frame is None:
            return ""
        line = users_line(frame)
        unit = last_collective()
        if unit:
            line += f", after the {unit} began"
        return line

    def _report(self, now: float) -> None:
        """Print the cause of a hang among the ranks of this machine, and the late ranks' state."""
        readings: dict[int, BoardContent] = {}
        for rank, peer in self._peers.items():
            reading = read_board(peer.board)
            if reading is not None and reading.rank == rank:
                readings[rank] = reading
        diagnosis = hang.find_hang(readings, now)
        if diagnosis is None:
            return

        self._reported = True
        states = {rank: stacks.state(reading.process) for rank, reading in readings.items()}
        ended = [rank for rank, state in states.items() if state in stacks.ENDED]
        self.hang_cause = hang.describe_cause(diagnosis, readings, ended=ended)
        # Every waiting rank reaches this point, and one of them prints the report.
        if min(waiting.rank for waiting in diagnosis.waiting) != dist.get_rank():
            return

        _print(self.hang_cause)
        folder = stacks.new_folder()
        for rank in diagnosis.suspects[:_MOST_STACKS]:
            if rank in readings:
                self._report_rank(rank, readings[rank], now, folder)

    def _report_rank(self, rank: int, reading: BoardContent, now: float, folder: Path) -> None:
        """Collect the stacks of a rank and print its condition."""
        # The state is read first, because collecting the stacks resumes a stopped process.
        state = stacks.state(reading.process)
        stack = stacks.collect(
            reading.process, self._peers[rank].stack, folder / f"rank-{rank}.txt", _STACK_SECONDS
        )
        _print(
            hang.condition(
                reading, now, state=state, line=stacks.users_line(stack), stack=str(stack or "")
            )
        )


@dataclass(frozen=True)
class _Peer:
    """A rank on this machine.

    Attributes:
        board: Path of its board.
        stack: Path of the file to which it writes its stacks.
    """

    board: Path
    stack: Path


def _print(text: str) -> None:
    # The main thread may hold the lock of sys.stderr.
    os.write(2, f"plait: {text}\n".encode())


def group_label(description: str, group: str) -> str:
    """Return a name of a process group for messages.

    Args:
        description: torch's description of the group, for example `mesh_dp_shard`.
        group: torch's name of the group, which is used if there is no description.
    """
    if description == "default_pg":
        return "all ranks"
    if description in ("", "undefined"):
        return f"group {group}"
    return description.removeprefix("mesh_")


def users_line(frame: FrameType) -> str:
    """Return the innermost line of user code on a stack, for example `train.py:33`.

    If there is no user code on the stack, the result is the innermost line of any code.
    """
    line_frame: FrameType | None = frame
    while line_frame is not None:
        if stacks.is_users(line_frame.f_code.co_filename):
            break
        line_frame = line_frame.f_back
    line_frame = line_frame or frame
    return f"{line_frame.f_code.co_filename}:{line_frame.f_lineno}"


WATCH = Watch()
"""Watchdog of this process."""


def _leave_board_to_parent() -> None:
    """Drop the board in a forked child, which shares the board's memory but must not change it."""
    WATCH.board = None


os.register_at_fork(after_in_child=_leave_board_to_parent)
