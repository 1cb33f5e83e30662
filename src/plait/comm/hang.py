"""Hang detection: boards on which ranks publish their progress, and the search for late ranks.

A board is a small file with the step and the phase of a rank, the collectives that it waits for,
and a heartbeat. The rank maps the file into memory, so that a write is a cheap store without a
lock. Other processes (`comm.watch`, the launcher) can read the board even if the rank is stopped,
holds the interpreter's lock or has ended. Times are those of the monotonic clock, which all
processes of a machine share.

Note [Late ranks]
    A rank is late for a collective if it is a member of the group and has not started the
    collective. A late rank that waits for another collective is not the cause, so the search
    continues with the ranks that are late for that collective. If the search returns to a rank that
    it has visited, the ranks issue different collectives and wait for each other.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import resource
import struct
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import InputError
from plait.files import anonymous_file
from plait.sizes import dtype_name

BYTES = 16 * 1024
"""Size of a board in bytes."""
_MAGIC = b"plait-1\0"
# Magic, process, rank, timeout.
_HEAD = struct.Struct("<8sqqd")
# Step, phase, time at which the phase began.
_PROGRESS = struct.Struct("<qqd")
# Time at which the wait began (0 if there is none), length of the JSON text that follows.
_WAIT = struct.Struct("<dH")
# Time of the last heartbeat, length of the JSON text that follows.
_HEARTBEAT = struct.Struct("<dH")
_PROGRESS_OFFSET = 64
_WAIT_OFFSET = 128
_HEARTBEAT_OFFSET = 1024
_WAIT_TEXT_OFFSET = _WAIT_OFFSET + _WAIT.size
_SIGN_TEXT_OFFSET = _HEARTBEAT_OFFSET + _HEARTBEAT.size
_WAIT_TEXT_BYTES = _HEARTBEAT_OFFSET - _WAIT_TEXT_OFFSET
_SIGN_TEXT_BYTES = BYTES - _SIGN_TEXT_OFFSET

PHASES = ("start", "between steps", "forward", "backward", "update", "evaluation", "checkpoint")
"""Names of the phases of a rank, for messages."""
START, BETWEEN, FORWARD, BACKWARD, UPDATE, EVALUATION, CHECKPOINT = range(len(PHASES))
HEARTBEAT_SECONDS = 3.0
"""Time without a heartbeat after which a call counts as holding the interpreter's lock."""


@dataclass(frozen=True)
class Wait:
    """A collective that a rank has started and that has not finished.

    Attributes:
        operation: Name of the operation, for example `all-reduce`.
        axis: Mesh dimension, or another name of the group.
        since: Time at which the rank started the collective.
        sequence: Number of the collective in its group, or 0 if it is unknown.
        shape: Shapes and dtypes of the tensors.
        missing: Global ranks that have not joined the collective, or None if they are unknown.
        members: Global ranks of the group. Empty if they are unknown.
        seen: Time at which the wait was last observed. Infinite if the rank removes the wait from
            its board when the wait ends.
    """

    operation: str
    axis: str
    since: float
    sequence: int = 0
    shape: str = ""
    missing: tuple[int, ...] | None = None
    members: tuple[int, ...] = ()
    seen: float = math.inf

    def is_same_collective(self, other: Wait) -> bool:
        """Return True if the wait of another rank is for the same collective."""
        return (self.operation, self.axis, self.members, self.sequence) == (
            other.operation,
            other.axis,
            other.members,
            other.sequence,
        )


@dataclass(frozen=True)
class BoardContent:
    """Snapshot of a board's content.

    Attributes:
        rank: Global rank.
        process: Number of the process (PID).
        timeout_seconds: Longest time that a wait may take.
        step: Step of the training.
        phase: Index in `PHASES`.
        since: Time at which the phase began.
        heartbeat: Time at which the interpreter last ran the watchdog thread, or at which the
            board was created.
        waits: Unfinished collectives. The wait that the main thread has published comes first.
        line: Line of user code that the main thread executed, for example `train.py:33`.
    """

    rank: int
    process: int
    timeout_seconds: float
    step: int
    phase: int
    since: float
    heartbeat: float
    waits: tuple[Wait, ...] = ()
    line: str = ""


def describe_tensor(shape: Sequence[int], dtype: object) -> str:
    """Return a shape and a dtype as text, for example `[1000] float32`."""
    return f"{list(shape)} {dtype_name(dtype)}"


class Board:
    """Board of this process.

    Args:
        rank: Global rank.
        timeout_seconds: Longest time that a wait may take.
        path: File of the board, or None for an anonymous file that disappears with the process.

    Attributes:
        path: Path under which other processes can open the board.
        step: Step of the training.
        timeout_seconds: Longest time that a wait may take.

    Raises:
        InputError: There is not enough space for the file.
    """

    def __init__(self, *, rank: int, timeout_seconds: float, path: Path | None = None) -> None:
        if path is None:
            self._descriptor = anonymous_file("plait-board")
            self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        else:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self.path = path
        try:
            # A write into a hole of a mapped file on a full disk would end the process by SIGBUS.
            os.posix_fallocate(self._descriptor, 0, BYTES)
        except OSError as error:
            os.close(self._descriptor)
            raise _no_room(error, path) from None

        self._memory = mmap.mmap(self._descriptor, BYTES)
        self.step = 0
        self.timeout_seconds = timeout_seconds
        self.progress(0, START)
        # If the watchdog thread never runs, the heartbeat is as old as the board.
        self.heartbeat()
        # Readers ignore a board without this head, so it is written last.
        _HEAD.pack_into(self._memory, 0, _MAGIC, os.getpid(), rank, timeout_seconds)

    def progress(self, step: int, phase: int) -> None:
        """Record the start of a phase of a step."""
        self.step = step
        _PROGRESS.pack_into(self._memory, _PROGRESS_OFFSET, step, phase, time.monotonic())

    def phase(self, phase: int) -> None:
        """Record the start of another phase of the same step."""
        self.progress(self.step, phase)

    @property
    def now(self) -> tuple[int, int, float]:
        """The current (step, phase, time at which the phase began)."""
        return _PROGRESS.unpack_from(self._memory, _PROGRESS_OFFSET)

    def wait(self, wait: Wait) -> None:
        """Record a wait of the main thread. Call this before the wait."""
        text = _wait_text(wait)
        self._memory[_WAIT_TEXT_OFFSET : _WAIT_TEXT_OFFSET + len(text)] = text
        _WAIT.pack_into(self._memory, _WAIT_OFFSET, wait.since, len(text))

    def waited(self) -> None:
        """Record that the main thread no longer waits."""
        _WAIT.pack_into(self._memory, _WAIT_OFFSET, 0.0, 0)

    @property
    def waiting_since(self) -> float:
        """Time at which the main thread's recorded wait began, or 0 if there is none."""
        return float(_WAIT.unpack_from(self._memory, _WAIT_OFFSET)[0])

    def heartbeat(self, waits: Sequence[Wait] = (), *, line: str = "", seen: float = 0.0) -> None:
        """Record a heartbeat, with the observations of the watchdog thread.

        Args:
            waits: Unfinished collectives that torch recorded. If they do not fit, the last ones
                are omitted.
            line: Line of user code that the main thread executes.
            seen: Time of the observation.
        """
        for count in range(len(waits), -1, -1):
            plain_waits = [_plain(wait) for wait in waits[:count]]
            text = json.dumps({"line": line, "seen": seen, "waits": plain_waits}).encode()
            if len(text) <= _SIGN_TEXT_BYTES:
                break
        self._memory[_SIGN_TEXT_OFFSET : _SIGN_TEXT_OFFSET + len(text)] = text
        _HEARTBEAT.pack_into(self._memory, _HEARTBEAT_OFFSET, time.monotonic(), len(text))

    def close(self) -> None:
        """Unmap the board and close its file."""
        self._memory.close()
        os.close(self._descriptor)


def _no_room(error: OSError, path: Path | None) -> InputError:
    purpose = f"a file of {BYTES:,} bytes, in which each process publishes what it waits for"
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return InputError(
            f"ulimit -f: processes may write at most {limit:,} bytes to a file, and Plait requires"
            f" {purpose}; raise the limit: ulimit -f unlimited"
        )
    folder = "memory" if path is None else str(path.parent)
    return InputError(
        f"{folder}: no space for {purpose} ({error.strerror}); free some space, or set TMPDIR to"
        " another folder for temporary files"
    )


def read_board(path: Path) -> BoardContent | None:
    """Return the content of a board, or None if it does not exist or is being written."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # There is no lock. Two equal reads show that the owner did not write between them.
        data = os.pread(descriptor, BYTES, 0)
        for _ in range(3):
            next_data = os.pread(descriptor, BYTES, 0)
            if next_data == data:
                return _reading(data)
            data = next_data
    except (OSError, ValueError, struct.error):
        return None
    finally:
        os.close(descriptor)
    return None


def _reading(data: bytes) -> BoardContent | None:
    if len(data) != BYTES or not data.startswith(_MAGIC):
        return None
    _, process, rank, timeout = _HEAD.unpack_from(data, 0)
    step, phase, since = _PROGRESS.unpack_from(data, _PROGRESS_OFFSET)
    waiting_since, length = _WAIT.unpack_from(data, _WAIT_OFFSET)
    heartbeat, heartbeat_length = _HEARTBEAT.unpack_from(data, _HEARTBEAT_OFFSET)

    observed: dict[str, Any] = {}
    if heartbeat:
        observed = json.loads(data[_SIGN_TEXT_OFFSET:][:heartbeat_length])
    waits = [_parsed_wait(plain, seen=observed["seen"]) for plain in observed.get("waits", ())]
    if waiting_since:
        plain = json.loads(data[_WAIT_TEXT_OFFSET:][:length])
        waits.insert(0, _parsed_wait(plain, seen=math.inf))
    line = observed.get("line", "")
    return BoardContent(rank, process, timeout, step, phase, since, heartbeat, tuple(waits), line)


def _plain(wait: Wait) -> dict[str, Any]:
    """Return the fields of a wait that do not have their default value, for JSON."""
    plain: dict[str, Any] = {}
    for name, value in vars(wait).items():
        if value not in ("", 0, ()) and name != "seen":
            plain[name] = value
    return plain


def _wait_text(wait: Wait) -> bytes:
    text = json.dumps(_plain(wait)).encode()
    if len(text) > _WAIT_TEXT_BYTES:
        # The ranks of a very large group do not fit.
        short = Wait(wait.operation, wait.axis[:100], wait.since, wait.sequence, wait.shape[:100])
        text = json.dumps(_plain(short)).encode()
    return text


def _parsed_wait(plain: dict[str, Any], *, seen: float) -> Wait:
    missing = plain.get("missing")
    return Wait(
        operation=plain["operation"],
        axis=plain.get("axis", ""),
        since=plain["since"],
        sequence=plain.get("sequence", 0),
        shape=plain.get("shape", ""),
        missing=None if missing is None else tuple(missing),
        members=tuple(plain.get("members", ())),
        seen=seen,
    )


@dataclass(frozen=True)
class Waiting:
    """Entry of a hang report: a rank that waits for a collective.

    Attributes:
        rank: Global rank.
        wait: The collective.
        line: Line of user code that the rank executes.
        seconds: Duration of the wait so far.
    """

    rank: int
    wait: Wait
    line: str
    seconds: float


@dataclass(frozen=True)
class Hang:
    """A wait that has reached its timeout, and the ranks that may be the cause.

    Attributes:
        waiting: Ranks that wait for the same collective. The first one has exceeded the timeout.
        late: Ranks that cause the hang. Empty if the ranks wait for each other.
        cycle: Ranks that wait for each other in different collectives. Empty if ranks are late.
        timeout_seconds: Longest time that a wait may take.
    """

    waiting: tuple[Waiting, ...]
    late: tuple[int, ...]
    cycle: tuple[Waiting, ...]
    timeout_seconds: float

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks whose stacks may show the cause."""
        if self.late:
            return self.late
        return tuple(waiting.rank for waiting in self.cycle or self.waiting)


def find_hang(readings: Mapping[int, BoardContent], now: float) -> Hang | None:
    """Return the hang if the wait of a rank has reached its timeout, and None otherwise.

    Args:
        readings: Boards by global rank.
        now: Time of the monotonic clock.
    """
    overdue = []
    for rank, reading in readings.items():
        for wait in reading.waits:
            if min(now, wait.seen) - wait.since >= reading.timeout_seconds:
                overdue.append(Waiting(rank, wait, reading.line, now - wait.since))
    if not overdue:
        return None
    first = min(overdue, key=lambda waiting: _detail_order(waiting.wait))
    late, cycle = _find_late(first, readings, now)
    others = [
        waiting
        for waiting in _waiting_ranks(readings, now)
        if waiting.rank != first.rank
        and waiting.wait.is_same_collective(first.wait)
        and waiting.rank not in late
    ]
    return Hang((first, *others), late, cycle, readings[first.rank].timeout_seconds)


def _waiting_ranks(readings: Mapping[int, BoardContent], now: float) -> list[Waiting]:
    """Return every waiting rank with its most detailed wait."""
    waiting = []
    for rank, reading in readings.items():
        if reading.waits:
            wait = min(reading.waits, key=_detail_order)
            waiting.append(Waiting(rank, wait, reading.line, now - wait.since))
    return waiting


def _detail_order(wait: Wait) -> tuple[bool, bool, float]:
    """Return a sort key by which waits with more details come first.

    Waits with known missing ranks precede waits with known members.
    """
    return wait.missing is None, not wait.members, wait.since


def _find_late(
    first: Waiting, readings: Mapping[int, BoardContent], now: float
) -> tuple[tuple[int, ...], tuple[Waiting, ...]]:
    """Return the late ranks, or else the ranks that wait for each other. See Note [Late ranks]."""
    by_rank = {waiting.rank: waiting for waiting in _waiting_ranks(readings, now)}
    visited: dict[int, Waiting] = {}
    causes: set[int] = set()
    queue = [first]
    while queue:
        current = queue.pop()
        visited[current.rank] = current
        for rank in _missing_ranks(current, readings):
            other = by_rank.get(rank)
            if other is None or other.wait.is_same_collective(current.wait):
                # The rank waits for nothing, or its board cannot be read, or it waits for this
                # collective although it counts as missing.
                causes.add(rank)
            elif rank not in visited:
                queue.append(other)

    if causes:
        return tuple(sorted(causes)), ()
    return (), tuple(visited[rank] for rank in sorted(visited))


def _missing_ranks(waiting: Waiting, readings: Mapping[int, BoardContent]) -> Sequence[int]:
    """Return the ranks that have not started the collective for which a rank waits."""
    if waiting.wait.missing is not None:
        return waiting.wait.missing
    participants = set()
    for rank, reading in readings.items():
        if any(wait.is_same_collective(waiting.wait) for wait in reading.waits):
            participants.add(rank)
    return [
        rank for rank in waiting.wait.members if rank != waiting.rank and rank not in participants
    ]


def describe_cause(
    hang: Hang, readings: Mapping[int, BoardContent], *, ended: Collection[int] = ()
) -> str:
    """Return a line for the user about the cause of a hang.

    Args:
        hang: Result of `find_hang`.
        readings: Boards by global rank.
        ended: Ranks of this machine whose processes have ended.
    """
    first = hang.waiting[0]
    limit = f"the timeout is {hang.timeout_seconds:g} s"
    if hang.cycle:
        waits = "; ".join(
            f"rank {waiting.rank} for {waiting.seconds:.1f} s in {_collective(waiting)}"
            for waiting in hang.cycle
        )
        return f"the ranks wait for each other in different collectives: {waits}; {limit}"

    waiting_ranks = format_ranks([waiting.rank for waiting in hang.waiting])
    have = "has" if len(hang.waiting) == 1 else "have"
    waited = f"{waiting_ranks} {have} waited {first.seconds:.1f} s in {_collective(first)}"
    if not hang.late:
        return f"{waited}, and no rank is late for it; {limit}"

    late_ranks = format_ranks(hang.late)
    place = _place(hang.late, readings)
    is_single = len(hang.late) == 1
    if set(hang.late) <= set(ended):
        have = "has" if is_single else "have"
        return f"{late_ranks} {have} ended{place}: {waited}; {limit}"

    unread = [rank for rank in hang.late if rank not in readings]
    where = ""
    if len(unread) == len(hang.late):
        where = ", on another machine or ended,"
    elif unread:
        where = f" ({format_ranks(unread)} elsewhere)"
    verb = "is" if is_single else "are"
    return f"{late_ranks}{where} {verb} stuck{place}: {waited}; {limit}"


def _place(ranks: Sequence[int], readings: Mapping[int, BoardContent]) -> str:
    """Return the step and the phase of ranks, or an empty string if the ranks differ."""
    steps = {readings[rank].step for rank in ranks if rank in readings}
    phases = {PHASES[readings[rank].phase] for rank in ranks if rank in readings}
    if len(steps) != 1 or len(phases) != 1:
        return ""
    return f" in step {steps.pop()}, {phases.pop()}"


def _collective(waiting: Waiting) -> str:
    """Return a description of the collective that a rank waits for."""
    wait = waiting.wait
    text = f"{wait.operation} over {wait.axis}" if wait.axis else wait.operation
    details = []
    if wait.sequence:
        details.append(f"number {wait.sequence}")
    if wait.shape:
        details.append(wait.shape)
    if details:
        text += f" ({', '.join(details)})"
    if waiting.line:
        text += f" at {waiting.line}"
    return text


def condition(
    reading: BoardContent, now: float, *, state: str = "", line: str = "", stack: str = ""
) -> str:
    """Return a line for the user about the progress and the condition of a rank.

    Args:
        reading: The rank's board.
        now: Time of the monotonic clock.
        state: Result of `stacks.state` for the rank's process.
        line: Line that the main thread executes. If it is empty, the line of the board is used.
        stack: File with the stacks of the rank's threads, or an empty string.
    """
    text = (
        f"rank {reading.rank} (process {reading.process}): step {reading.step},"
        f" {PHASES[reading.phase]}, for {now - reading.since:.1f} s"
    )
    place = line or reading.line
    if place:
        text += f", at {place}"

    silent_seconds = now - reading.heartbeat
    if state in ("T", "t"):
        text += "; its process is stopped (SIGSTOP, or a debugger)"
    elif state in ("", "Z", "X"):
        text += "; its process has ended"
    elif state == "D":
        text += "; its process waits for a disk or a device"
    elif reading.heartbeat and silent_seconds > HEARTBEAT_SECONDS:
        text += (
            f"; its interpreter has run no other thread for {silent_seconds:.1f} s: a call holds"
            " the interpreter's lock"
        )
    if stack:
        text += f"; the stacks of its threads are in {stack}"
    return text


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text with ranges, for example `rank 3` or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
