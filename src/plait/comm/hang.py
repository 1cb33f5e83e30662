"""Diagnosis of hangs: the rank that others wait for, from the boards of all ranks.

Note [Late ranks]
    A rank is late for a collective if it is a member of its group and has not begun it. A late
    rank that waits for another collective is not the cause, so the search continues with the ranks
    that are late for that one. If the search returns to ranks that it has visited, the ranks issue
    different collectives and wait for each other.

The module only computes. `comm.watch` and the launcher read the boards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from plait.comm.board import PHASES, BoardContent, Wait

SIGN_SECONDS = 3.0
"""Silence after which an interpreter counts as stopped, or its lock as held by a call."""


@dataclass(frozen=True)
class Waiting:
    """A rank that waits.

    Attributes:
        rank: Global rank.
        wait: The collective.
        line: Line of user code that the rank is at.
        seconds: Duration of the wait so far.
    """

    rank: int
    wait: Wait
    line: str
    seconds: float


@dataclass(frozen=True)
class Hang:
    """A wait that has taken its timeout, and the ranks that may be the cause.

    Attributes:
        waiting: Ranks that wait for the same collective. The first one has exceeded the timeout.
        late: Ranks that are the cause. Empty if the ranks wait for each other.
        circle: Ranks that wait for each other in different collectives.
        timeout_seconds: Longest time that a wait may take.
    """

    waiting: tuple[Waiting, ...]
    late: tuple[int, ...]
    circle: tuple[Waiting, ...]
    timeout_seconds: float

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks whose stacks are of interest."""
        if self.late:
            return self.late
        return tuple(waiting.rank for waiting in self.circle or self.waiting)


def find_hang(readings: Mapping[int, BoardContent], now: float) -> Hang | None:
    """Return the hang if a wait of a rank has taken its timeout, else None.

    Args:
        readings: Boards by global rank.
        now: Time of the monotonic clock.
    """
    overdue = [
        Waiting(rank, wait, reading.line, now - wait.since)
        for rank, reading in readings.items()
        for wait in reading.waits
        if min(now, wait.seen) - wait.since >= reading.timeout_seconds
    ]
    if not overdue:
        return None
    first = min(overdue, key=lambda waiting: _detail_order(waiting.wait))
    late, circle = _find_late(first, readings, now)
    others = [
        waiting
        for waiting in _waiting_ranks(readings, now)
        if waiting.rank != first.rank
        and waiting.wait.same_as(first.wait)
        and waiting.rank not in late
    ]
    return Hang((first, *others), late, circle, readings[first.rank].timeout_seconds)


def _waiting_ranks(readings: Mapping[int, BoardContent], now: float) -> list[Waiting]:
    """Return every waiting rank with its most detailed wait."""
    waiting = []
    for rank, reading in readings.items():
        if reading.waits:
            wait = min(reading.waits, key=_detail_order)
            waiting.append(Waiting(rank, wait, reading.line, now - wait.since))
    return waiting


def _detail_order(wait: Wait) -> tuple[bool, bool, float]:
    """Return a key that sorts waits by detail: known missing ranks first, then known members."""
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
            if other is None or other.wait.same_as(current.wait):
                # The rank waits for nothing, or its board cannot be read, or it waits for this
                # collective although it has not taken part.
                causes.add(rank)
            elif rank not in visited:
                queue.append(other)

    if causes:
        return tuple(sorted(causes)), ()
    return (), tuple(visited[rank] for rank in sorted(visited))


def _missing_ranks(waiting: Waiting, readings: Mapping[int, BoardContent]) -> Sequence[int]:
    """Return the members of a collective that have not begun it."""
    if waiting.wait.missing is not None:
        return waiting.wait.missing
    participants = set()
    for rank, reading in readings.items():
        if any(wait.same_as(waiting.wait) for wait in reading.waits):
            participants.add(rank)
    return [
        rank for rank in waiting.wait.members if rank != waiting.rank and rank not in participants
    ]


def describe_cause(
    hang: Hang, readings: Mapping[int, BoardContent], *, ended: Collection[int] = ()
) -> str:
    """Return a line about the cause of a hang, for the user.

    Args:
        hang: Result of `find`.
        readings: Boards by global rank.
        ended: Ranks of this machine whose processes have ended.
    """
    first = hang.waiting[0]
    limit = f"the timeout is {hang.timeout_seconds:g} s"
    if hang.circle:
        waits = "; ".join(
            f"rank {waiting.rank} for {waiting.seconds:.1f} s in {_collective(waiting)}"
            for waiting in hang.circle
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
    """Return the step and the phase of ranks, or an empty string if they differ."""
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
    """Return a line about the progress and the condition of a rank, for the user.

    Args:
        reading: The rank's board.
        now: Time of the monotonic clock.
        state: The kernel's letter for the state of the process.
        line: Line that the main thread is at. Without it the board's line is used.
        stack: File with the stacks of the rank's threads.
    """
    text = (
        f"rank {reading.rank} (process {reading.process}): step {reading.step},"
        f" {PHASES[reading.phase]}, for {now - reading.since:.1f} s"
    )
    place = line or reading.line
    if place:
        text += f", at {place}"

    silent_seconds = now - reading.sign
    if state in ("T", "t"):
        text += "; its process is stopped (SIGSTOP, or a debugger)"
    elif state in ("", "Z", "X"):
        text += "; its process has ended"
    elif state == "D":
        text += "; its process waits for a disk or a device"
    elif reading.sign and silent_seconds > SIGN_SECONDS:
        text += (
            f"; its interpreter has run no other thread for {silent_seconds:.1f} s: a call holds"
            " the interpreter's lock"
        )
    if stack:
        text += f"; the stacks of its threads are in {stack}"
    return text


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text with runs shortened, for example `rank 3` or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
