"""When every computation of a schedule runs, given how long each takes: the idle part of the step
and the activations held.

Iterates over the same table as the runtime, with one assumption a line: a rank computes one action
at a time, in its order; a message starts when its producer ends and the link is free, and takes no
time of either rank (communication overlaps with computation); what a rank receives waits without
limit. Stages may differ in cost. Units are the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.errors import InputError
from plait.parallel.schedules.actions import Action, Kind, Message, Numbered
from plait.parallel.schedules.schedule import Schedule, destination, in_order


@dataclass(frozen=True)
class Durations:
    """How long one micro-batch takes on each stage, and across each boundary between neighbouring
    stages.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    """The gradient of the input alone."""
    weight: tuple[float, ...]
    """The gradients of the weights alone. An unsplit backward takes input + weight."""
    send: tuple[float, ...]
    """Entry s: a message between stages s and s + 1, either way. Not used where both are on one
    rank.
    """

    def of(self, action: Action) -> float:
        """How long one action takes."""
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
    """Stages of equal cost. `forward`, `input` and `weight` are what all stages of a rank take
    together for one micro-batch, so that schedules with different numbers of stages do the same
    work; `send` is one message.
    """
    each = schedule.stages // schedule.pp
    stages = schedule.stages
    return Durations(
        (forward / each,) * stages,
        (input / each,) * stages,
        (weight / each,) * stages,
        (send,) * (stages - 1),
    )


@dataclass(frozen=True, slots=True)
class Span:
    """An action and when it runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message in flight from one rank to another."""

    message: Message
    source: int
    destination: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step, from the start of the first action at 0 to the end of the last."""

    schedule: Schedule
    ranks: tuple[tuple[Span, ...], ...]
    """What each pp rank does, in order."""
    transfers: tuple[Transfer, ...] = ()
    """What passes between ranks; those of one pair are in order."""

    @property
    def total(self) -> float:
        """When the last rank ends."""
        return max(row[-1].end for row in self.ranks)

    def busy(self, rank: int) -> float:
        """How long a rank computes."""
        return sum(span.end - span.start for span in self.ranks[rank])

    def bubble(self, rank: int) -> float:
        """The part of the step in which a rank computes nothing, 0 to 1."""
        return 1 - self.busy(rank) / self.total if self.total else 0.0

    @property
    def bubble_overall(self) -> float:
        """The mean of the ranks' bubbles: the part of all ranks' time that is idle."""
        return sum(self.bubble(rank) for rank in range(len(self.ranks))) / len(self.ranks)


def simulate(schedule: Schedule, durations: Durations) -> Timeline:
    """Run the table. Messages of one (source, destination) pair go one after another, in the order
    of `schedule.messages`.

    Raises InputError for durations of another number of stages or below 0.
    """
    _check(schedule, durations)
    rows: list[list[Span]] = [[] for _ in schedule.ranks]
    transfers: list[Transfer] = []
    numbered = Numbered(stages=schedule.stages, microbatches=schedule.microbatches)
    free = [0.0] * len(schedule.ranks)
    link_free: dict[tuple[int, int], float] = {}
    ready = [0.0] * numbered.size  # when its producer has it
    arrived = [0.0] * numbered.size  # when the neighbouring stage has it
    for rank, action in in_order(schedule):
        start = free[rank]
        for need in numbered.needed_by(action):
            start = max(start, (ready if numbered.stage(need) == action.stage else arrived)[need])
        end = free[rank] = start + durations.of(action)
        rows[rank].append(Span(action, start, end))
        made = numbered.produced_by(action)
        if made is None:
            continue
        ready[made] = arrived[made] = end
        message = numbered.message(made)
        to = destination(schedule, message)
        if to is not None:
            boundary = message.stage if action.kind is Kind.FORWARD else message.stage - 1
            begins = max(end, link_free.get((rank, to), 0.0))
            link_free[rank, to] = arrived[made] = begins + durations.send[boundary]
            transfers.append(Transfer(message, rank, to, begins, arrived[made]))
    return Timeline(schedule, tuple(tuple(row) for row in rows), tuple(transfers))


def _check(schedule: Schedule, durations: Durations) -> None:
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
                f"durations.{name}: {min(values)} to {max(values)}; a duration is finite and not"
                " below 0"
            )


def peak_in_flight(schedule: Schedule, *, held: Sequence[float] | None = None) -> tuple[float, ...]:
    """The most that every pp rank holds of activations at one moment. A forward holds `held[stage]`
    from its start to the end of its backward, with a split backward to the end of W.

    `held` left out: 1 / (stages a rank), so that the result counts micro-batches through all stages
    of a rank. Give bytes for bytes, or 1 for each stage to count single stages. A rank does one
    thing at a time, so the order of its actions decides; durations do not.
    """
    size = tuple(held) if held is not None else (schedule.pp / schedule.stages,) * schedule.stages
    if len(size) != schedule.stages:
        raise InputError(
            f"held has {len(size)} values; {schedule.name} with {schedule.stages} stages needs"
            f" {schedule.stages}"
        )
    peaks = []
    for rank, row in enumerate(schedule.ranks):
        counts = dict.fromkeys(schedule.stages_of(rank), 0)
        peak = 0.0
        for action in row:
            if action.kind is Kind.FORWARD:
                counts[action.stage] += 1
                peak = max(peak, sum(count * size[stage] for stage, count in counts.items()))
            elif action.kind is not Kind.INPUT:
                counts[action.stage] -= 1
        peaks.append(peak)
    return tuple(peaks)
