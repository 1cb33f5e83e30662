"""Simulation of a pipeline schedule: the idle part of a step, and the activations in memory.

It reads the same table as the runtime, with these assumptions. A rank computes one action at a
time, in its order. A message starts when its producer ends and the link is free, and takes no time
of either rank, because communication overlaps with computation. Received messages are buffered
without limit. Stages may differ in cost. The caller chooses the unit of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.errors import InputError
from plait.parallel.schedules.schedule import (
    Action,
    Kind,
    MessageNumbers,
    Schedule,
    destination,
    in_order,
)


def simulate(schedule: Schedule, durations: Durations) -> Timeline:
    """Return the times of all actions of a schedule.

    Messages between a pair of ranks are sent one after another, in their order.

    Raises:
        InputError: `durations` has the wrong number of stages, or a duration below 0.
    """
    _check_durations(schedule, durations)
    rows: list[list[Span]] = [[] for _ in schedule.ranks]
    numbers = MessageNumbers(stages=schedule.stages, microbatches=schedule.microbatches)
    free = [0.0] * len(schedule.ranks)
    link_free: dict[tuple[int, int], float] = {}
    # Times at which the producer and the receiver of each message have it.
    ready = [0.0] * numbers.size
    arrived = [0.0] * numbers.size
    for rank, action in in_order(schedule):
        # Results of the stage itself need no message.
        start = free[rank]
        for needed in numbers.needed_by(action):
            if numbers.stage(needed) == action.stage:
                start = max(start, ready[needed])
            else:
                start = max(start, arrived[needed])
        end = start + durations.duration(action)
        free[rank] = end
        rows[rank].append(Span(action, start, end))

        produced = numbers.produced_by(action)
        if produced is None:
            continue
        ready[produced] = end
        arrived[produced] = end
        message = numbers.message(produced)
        to = destination(schedule, message)
        if to is not None:
            boundary = message.stage - 1
            if action.kind is Kind.FORWARD:
                boundary = message.stage
            begin = max(end, link_free.get((rank, to), 0.0))
            arrival = begin + durations.send[boundary]
            link_free[rank, to] = arrival
            arrived[produced] = arrival
    return Timeline(schedule, tuple(tuple(row) for row in rows))


@dataclass(frozen=True)
class Durations:
    """Durations of one micro-batch on each stage, and across each boundary between stages."""

    forward: tuple[float, ...]
    input: tuple[float, ...]
    """Durations of computing the gradient of the input only."""
    weight: tuple[float, ...]
    """Durations of computing the weight gradients only. An unsplit backward adds `input`."""
    send: tuple[float, ...]
    """Durations of a message between stages s and s + 1, in either direction.

    Not used if both are on one rank.
    """

    def duration(self, action: Action) -> float:
        """Return the duration of an action."""
        stage = action.stage
        if action.kind is Kind.FORWARD:
            return self.forward[stage]
        if action.kind is Kind.INPUT:
            return self.input[stage]
        if action.kind is Kind.WEIGHT:
            return self.weight[stage]
        return self.input[stage] + self.weight[stage]


def even(
    schedule: Schedule,
    *,
    forward: float = 1.0,
    input: float = 1.0,
    weight: float = 1.0,
    send: float = 0.0,
) -> Durations:
    """Return durations for stages of equal cost.

    The total work is the same for schedules with different numbers of stages.

    Args:
        schedule: The schedule.
        forward: Duration of a forward of all stages of a rank together, per micro-batch.
        input: Duration of computing the gradients of inputs of all stages of a rank.
        weight: Duration of computing the gradients of weights of all stages of a rank.
        send: Duration of a message.
    """
    stages_per_rank = schedule.stages // schedule.pp
    stages = schedule.stages
    return Durations(
        (forward / stages_per_rank,) * stages,
        (input / stages_per_rank,) * stages,
        (weight / stages_per_rank,) * stages,
        (send,) * (stages - 1),
    )


@dataclass(frozen=True, slots=True)
class Span:
    """Action with its start and end time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Times of the actions of a step. The first one starts at 0."""

    schedule: Schedule
    ranks: tuple[tuple[Span, ...], ...]
    """Actions of each pp rank, in order."""

    @property
    def total(self) -> float:
        """End of the last action."""
        return max(row[-1].end for row in self.ranks)

    def busy(self, rank: int) -> float:
        """Return the time for which a rank computes."""
        return sum(span.end - span.start for span in self.ranks[rank])

    def bubble(self, rank: int) -> float:
        """Return the share of the step, from 0 to 1, in which a rank does not compute."""
        if not self.total:
            return 0.0
        return 1 - self.busy(rank) / self.total

    @property
    def bubble_overall(self) -> float:
        """Mean over all ranks of the share of the step in which a rank is idle, from 0 to 1."""
        return sum(self.bubble(rank) for rank in range(len(self.ranks))) / len(self.ranks)


def peak_in_flight(
    schedule: Schedule, *, sizes: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Return the largest size of the activations that each pp rank holds at any one time.

    Activations of size `sizes[stage]` exist from the start of a forward to the end of its backward,
    or of W if the backward is split. A rank runs one action at a time, so the result
    depends on the order of its actions and not on durations.

    Args:
        schedule: The schedule.
        sizes: Size of the activations of a forward of each stage, e.g. in bytes. By default 1 /
            (stages per rank), so that the result counts micro-batches through all stages of a rank.

    Raises:
        InputError: `sizes` has the wrong number of stages.
    """
    if sizes is None:
        sizes = (schedule.pp / schedule.stages,) * schedule.stages
    if len(sizes) != schedule.stages:
        raise InputError(
            f"sizes has {len(sizes)} values; {schedule.name} with {schedule.stages} stages needs"
            f" {schedule.stages}"
        )
    peaks = []
    for rank, row in enumerate(schedule.ranks):
        counts = dict.fromkeys(schedule.stages_of(rank), 0)
        peak = 0.0
        for action in row:
            if action.kind is Kind.FORWARD:
                counts[action.stage] += 1
                peak = max(peak, sum(count * sizes[stage] for stage, count in counts.items()))
            # A split backward holds the activations until W.
            elif action.kind is not Kind.INPUT:
                counts[action.stage] -= 1
        peaks.append(peak)
    return tuple(peaks)


def _check_durations(schedule: Schedule, durations: Durations) -> None:
    lengths = {
        "forward": schedule.stages,
        "input": schedule.stages,
        "weight": schedule.stages,
        "send": schedule.stages - 1,
    }
    for name, length in lengths.items():
        values = getattr(durations, name)
        if len(values) != length:
            raise InputError(
                f"durations.{name} has {len(values)} values; {schedule.name} with {schedule.stages}"
                f" stages needs {length}"
            )
        if not all(0 <= value < float("inf") for value in values):
            raise InputError(
                f"durations.{name} from {min(values)} to {max(values)}: every duration must be"
                " finite and at least 0"
            )
