"""Who is late: from what all ranks published, the rank that the others wait for, and the sentence
that says so.

Pure. A rank is late for a collective when it is one of its ranks and has not begun it. A rank that
is late because it waits for another collective is not the cause: then it is asked who is late
there. Where that ends in a circle, the ranks issue different collectives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from plait.comm.board import PHASES, Reading, Wait

SIGN_SECONDS = 3.0
"""A rank whose interpreter has not run for so long is stopped, or holds the interpreter's lock."""


@dataclass(frozen=True)
class Waiting:
    """A rank and what it waits for."""

    rank: int
    wait: Wait
    line: str
    seconds: float


@dataclass(frozen=True)
class Hang:
    """A wait that has taken its timeout, and the ranks to look at."""

    waiting: tuple[Waiting, ...]
    """Of the same collective; the first has waited longest."""
    late: tuple[int, ...]
    """The ranks that are the cause; empty where the ranks wait for each other."""
    circle: tuple[Waiting, ...]
    """Ranks that wait for each other in different collectives."""
    timeout_seconds: float

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks whose stacks tell more."""
        return (
            self.late
            or tuple(one.rank for one in self.circle)
            or tuple(one.rank for one in self.waiting)
        )


def find(readings: Mapping[int, Reading], now: float) -> Hang | None:
    """The hang, if a wait of one of the ranks has taken its timeout."""
    overdue = [
        Waiting(rank, wait, reading.line, now - wait.since)
        for rank, reading in readings.items()
        for wait in reading.waits
        if min(now, wait.seen) - wait.since >= reading.timeout_seconds
    ]
    if not overdue:
        return None
    first = min(overdue, key=lambda one: _silence(one.wait))
    late, circle = _late(first, readings, now)
    same = [
        one
        for one in _waiting(readings, now)
        if one.rank != first.rank and one.wait.same_as(first.wait) and one.rank not in late
    ]
    return Hang((first, *same), late, circle, readings[first.rank].timeout_seconds)


def _waiting(readings: Mapping[int, Reading], now: float) -> list[Waiting]:
    """Every rank with the wait that says most."""
    most = {
        rank: min(reading.waits, key=_silence)
        for rank, reading in readings.items()
        if reading.waits
    }
    return [
        Waiting(rank, wait, readings[rank].line, now - wait.since) for rank, wait in most.items()
    ]


def _silence(wait: Wait) -> tuple[bool, bool, float]:
    """Orders descriptions: first the one that knows who is missing, else who takes part."""
    return wait.missing is None, not wait.members, wait.since


def _late(
    first: Waiting, readings: Mapping[int, Reading], now: float
) -> tuple[tuple[int, ...], tuple[Waiting, ...]]:
    by_rank = {one.rank: one for one in _waiting(readings, now)}
    asked: dict[int, Waiting] = {}
    causes: set[int] = set()
    ask = [first]
    while ask:
        one = ask.pop()
        asked[one.rank] = one
        for rank in _missing(one, readings):
            other = by_rank.get(rank)
            if other is None or other.wait.same_as(one.wait):
                causes.add(rank)  # it waits for nothing, or says nothing
            elif rank not in asked:
                ask.append(other)
    return tuple(sorted(causes)), (
        () if causes else tuple(sorted(asked.values(), key=lambda one: one.rank))
    )


def _missing(one: Waiting, readings: Mapping[int, Reading]) -> Sequence[int]:
    if one.wait.missing is not None:
        return one.wait.missing
    taking_part = {
        rank
        for rank, reading in readings.items()
        if any(wait.same_as(one.wait) for wait in reading.waits)
    }
    return [rank for rank in one.wait.members if rank != one.rank and rank not in taking_part]


def cause(hang: Hang, readings: Mapping[int, Reading], *, ended: Collection[int] = ()) -> str:
    """Return the first line that a user reads. `ended`: ranks of this machine whose processes have
    ended.
    """
    first = hang.waiting[0]
    limit = f"the timeout is {hang.timeout_seconds:g} s"
    if hang.circle:
        each = "; ".join(
            f"rank {one.rank} for {one.seconds:.1f} s in {_collective(one)}" for one in hang.circle
        )
        return f"the ranks wait for each other in different collectives: {each}; {limit}"
    others = names([one.rank for one in hang.waiting])
    have = "has" if len(hang.waiting) == 1 else "have"
    if not hang.late:
        return (
            f"{others} {have} waited {first.seconds:.1f} s in {_collective(first)}, and no rank is"
            f" late for it; {limit}"
        )
    waited = f"{others} {have} waited {first.seconds:.1f} s in {_collective(first)}; {limit}"
    if set(hang.late) <= set(ended):
        has = "has" if len(hang.late) == 1 else "have"
        return f"{names(hang.late)} {has} ended{_place(hang.late, readings)}: {waited}"
    away = [rank for rank in hang.late if rank not in readings]
    where = (
        ""
        if not away
        else (
            ", on another machine or ended,"
            if len(away) == len(hang.late)
            else f" ({names(away)} elsewhere)"
        )
    )
    verb = "is" if len(hang.late) == 1 else "are"
    return f"{names(hang.late)}{where} {verb} stuck{_place(hang.late, readings)}: {waited}"


def _place(ranks: Sequence[int], readings: Mapping[int, Reading]) -> str:
    """Return the step and phase that ranks are in; "" where they are not all in the same."""
    steps = {readings[rank].step for rank in ranks if rank in readings}
    phases = {PHASES[readings[rank].phase] for rank in ranks if rank in readings}
    return f" in step {steps.pop()}, {phases.pop()}" if len(steps) == len(phases) == 1 else ""


def _collective(one: Waiting) -> str:
    wait = one.wait
    details = [
        *([f"number {wait.sequence}"] if wait.sequence else []),
        *([wait.shape] if wait.shape else []),
    ]
    text = f"{wait.operation} over {wait.axis}" if wait.axis else wait.operation
    return (
        text
        + (f" ({', '.join(details)})" if details else "")
        + (f" at {one.line}" if one.line else "")
    )


def condition(
    reading: Reading, now: float, *, state: str = "", line: str = "", stack: str = ""
) -> str:
    """One line about a rank: where it is, and in which condition. `state`: the kernel's letter for
    its process; `line`: where its main thread is; `stack`: the file with the stacks of its threads.
    """
    text = (
        f"rank {reading.rank} (process {reading.process}): step {reading.step},"
        f" {PHASES[reading.phase]}, for {now - reading.since:.1f} s"
    )
    place = line or reading.line
    text += f", at {place}" if place else ""
    silent = now - reading.sign
    if state in ("T", "t"):
        text += "; its process is stopped (SIGSTOP, or a debugger)"
    elif state in ("", "Z", "X"):
        text += "; its process has ended"
    elif state == "D":
        text += "; its process waits for a disk or a device"
    elif reading.sign and silent > SIGN_SECONDS:
        text += (
            f"; its interpreter has run no other thread for {silent:.1f} s: a call holds the"
            " interpreter's lock"
        )
    return text + (f"; the stacks of its threads are in {stack}" if stack else "")


def names(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
