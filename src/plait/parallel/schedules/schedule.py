"""Pipeline schedules as tables: the order of computations of every pp rank.

The runtime, the simulator (`timeline`), the drawing and the tests read the same `Schedule`. GPipe
and 1F1B are generated here, and the others by torch's generators, without a process group. Every
table that `make_schedule` returns has passed `Schedule.check`: each stage runs each micro-batch
forward and backward exactly once, and no rank waits forever. The messages between stages follow
from the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, NamedTuple

from plait._torch.pipelining import schedule_actions
from plait.errors import ConfigError, InputError, Problem, raise_problems
from plait.names import suggest_names


class Kind(StrEnum):
    """Kind of a computation.

    A backward is either unsplit (B), or split in two (I and W) so that the second half can fill a
    bubble.
    """

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the stage's input and of its weights."""
    INPUT = "I"
    """Gradient of the stage's input only, which the previous stage waits for."""
    WEIGHT = "W"
    """Gradients of the stage's weights. It runs after I of the same micro-batch."""


@dataclass(frozen=True, slots=True)
class Action:
    """Computation of a stage on a micro-batch.

    It is printed as `2F0`: stage 2, forward, micro-batch 0.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Payload(StrEnum):
    """Kind of a tensor that a stage sends to a neighbouring stage."""

    ACTIVATION = "activation"
    """Output of a forward, for the next stage."""
    GRADIENT = "gradient"
    """Gradient of a stage's input, for the previous stage."""


class Message(NamedTuple):
    """Message of a stage to a neighbour, identified by payload, sending stage and micro-batch."""

    payload: Payload
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"the {self.payload} of stage {self.stage} for micro-batch {self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """Table of computations. `messages` derives the transfers between ranks from it."""

    name: str
    pp: int
    """Number of pipeline ranks."""
    microbatches: int
    """Micro-batches per optimizer step."""
    stage_ranks: tuple[int, ...]
    """Rank of each stage over pp."""
    ranks: tuple[tuple[Action, ...], ...]
    """Computations of each pp rank, in order."""

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.stage_ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages on a pp rank, in the order of the model."""
        return tuple(stage for stage in range(self.stages) if self.stage_ranks[stage] == rank)

    @property
    def splits_backward(self) -> bool:
        """True if backwards are split into I (inputs) and W (weights)."""
        return any(action.kind in (Kind.INPUT, Kind.WEIGHT) for row in self.ranks for action in row)

    def check(self) -> None:
        """Check that the table can be run.

        It must be complete, with every action once and on its stage's rank, and without a deadlock.

        Raises:
            InputError: The table cannot be run. The error names the first defect.
        """
        _check_shape(self)
        _check_counts(self)
        for _ in in_order(self):
            pass


@dataclass(frozen=True)
class ScheduleSpec:
    """Properties of a schedule that its name determines."""

    summary: str
    stages_per_rank: tuple[int, int | None]
    """Fewest and most stages per rank. None: any number."""
    placement: Literal["loop", "v"] = "loop"
    """Placement of the stages.

    `loop`: stage s is on rank s % pp. `v`: stages s and 2 pp - 1 - s are on rank s, so that rank 0
    has both ends.
    """
    generator: str | None = None
    """Class of torch that generates the table, or None for a generator of this module."""
    splits_backward: bool = False
    """True if gradients of weights are computed separately from those of inputs."""

    @property
    def default_stages_per_rank(self) -> int:
        """The only possible number of stages per rank, or 2 if several are possible."""
        fewest, most = self.stages_per_rank
        if most == fewest:
            return fewest
        return 2


SCHEDULES: Mapping[str, ScheduleSpec] = MappingProxyType(
    {
        "gpipe": ScheduleSpec(
            "all forwards, then all backwards; holds the activations of every micro-batch", (1, 1)
        ),
        "1f1b": ScheduleSpec(
            "one forward, one backward in turn; GPipe's bubble, activations of at most pp"
            " micro-batches",
            (1, 1),
        ),
        "interleaved-1f1b": ScheduleSpec(
            "1F1B over several stages per rank: the bubble divided by their number, for as many"
            " times the messages",
            (2, None),
            generator="ScheduleInterleaved1F1B",
        ),
        "looped-bfs": ScheduleSpec(
            "GPipe over several stages per rank: one stage after the other, all micro-batches in a"
            " row on each",
            (1, None),
            generator="ScheduleLoopedBFS",
        ),
        "interleaved-zero-bubble": ScheduleSpec(
            "interleaved, with the gradients of the weights deferred into the bubble (ZB1P)",
            (2, None),
            generator="ScheduleInterleavedZeroBubble",
            splits_backward=True,
        ),
        "zbv": ScheduleSpec(
            "zero bubble over a V of stages: no gap where F, I and W take equally long",
            (2, 2),
            "v",
            generator="ScheduleZBVZeroBubble",
            splits_backward=True,
        ),
        "dualpipev": ScheduleSpec(
            "a V of stages in which forwards overlap with backwards, and so can their"
            " communication",
            (2, 2),
            "v",
            generator="ScheduleDualPipeV",
            splits_backward=True,
        ),
    }
)
"""Properties of each schedule by its name."""


def make_schedule(
    name: str, *, pp: int, microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """Return the checked table of a schedule.

    Args:
        name: Name in SCHEDULES.
        pp: Number of pipeline ranks.
        microbatches: Micro-batches per step.
        stages_per_rank: Stages per rank, or None for the default of the schedule.

    Raises:
        ConfigError: The schedule does not exist for these numbers. The message names numbers that
            work.
    """
    spec = SCHEDULES.get(name)
    if spec is None:
        raise ConfigError(
            Problem(
                "parallel.pipeline.schedule",
                name,
                "is not a pipeline schedule that Plait runs",
                suggest_names(name, SCHEDULES),
            )
        )
    if stages_per_rank is None:
        stages_per_rank = spec.default_stages_per_rank
    raise_problems(
        problems_of(name, pp=pp, microbatches=microbatches, stages_per_rank=stages_per_rank)
    )
    schedule = Schedule(
        name,
        pp,
        microbatches,
        _stage_ranks(spec, pp, stages_per_rank),
        _rows(name, pp, microbatches, stages_per_rank),
    )
    schedule.check()
    return schedule


def row_of(
    name: str, *, pp: int, microbatches: int, stages_per_rank: int, rank: int
) -> tuple[Action, ...]:
    """Return the row of one rank of the table of `make_schedule`.

    The arguments are not checked again. Only this row is generated, which takes a fraction of the
    time of the complete table.
    """
    return _rows(name, pp, microbatches, stages_per_rank, only=rank)[rank]


def _rows(
    name: str, pp: int, microbatches: int, stages_per_rank: int, *, only: int | None = None
) -> tuple[tuple[Action, ...], ...]:
    """Return the rows of all ranks. With `only`, the rows of other ranks are empty."""
    generator = SCHEDULES[name].generator
    rows: list[tuple[Action, ...]] = [()] * pp
    ranks: Sequence[int] = range(pp)
    if only is not None:
        ranks = (only,)
    if generator is None:
        for rank in ranks:
            rows[rank] = tuple(_GENERATORS[name](rank, pp, microbatches))
        return tuple(rows)

    table = schedule_actions(
        generator, pp=pp, stages_per_rank=stages_per_rank, microbatches=microbatches, only=only
    )
    for rank in ranks:
        rows[rank] = tuple(
            Action(stage, Kind(kind), microbatch) for stage, kind, microbatch in table[rank]
        )
    return tuple(rows)


def _stage_ranks(spec: ScheduleSpec, pp: int, stages_per_rank: int) -> tuple[int, ...]:
    if spec.placement == "v":
        return (*range(pp), *reversed(range(pp)))
    return tuple(range(pp)) * stages_per_rank


def _gpipe(rank: int, pp: int, microbatches: int) -> Iterator[Action]:
    """Yield the row of a rank: all forwards, and then all backwards.

    Huang et al. 2019, arXiv:1811.06965.
    """
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for microbatch in range(microbatches):
            yield Action(rank, kind, microbatch)


def _one_forward_one_backward(rank: int, pp: int, microbatches: int) -> Iterator[Action]:
    """Yield the row of a rank. It starts with one forward per later pipeline rank.

    PipeDream-Flush, Narayanan et al. 2021, arXiv:2104.04473.
    """
    # Fill the pipeline.
    ahead = min(microbatches, pp - 1 - rank)
    for microbatch in range(ahead):
        yield Action(rank, Kind.FORWARD, microbatch)
    # One forward and one backward in turn. In the end only backwards are left.
    for microbatch in range(microbatches):
        if ahead + microbatch < microbatches:
            yield Action(rank, Kind.FORWARD, ahead + microbatch)
        yield Action(rank, Kind.BACKWARD, microbatch)


_GENERATORS: Mapping[str, Callable[[int, int, int], Iterator[Action]]] = MappingProxyType(
    {"gpipe": _gpipe, "1f1b": _one_forward_one_backward}
)


def problems_of(
    name: str, *, pp: int, microbatches: int, stages_per_rank: int
) -> tuple[Problem, ...]:
    """Return the reasons why a schedule of SCHEDULES does not exist for these numbers.

    The result is empty if the schedule exists. The table of its actions is not generated.
    """
    return tuple(_problems(name, SCHEDULES[name], pp, microbatches, stages_per_rank))


def _problems(
    name: str, spec: ScheduleSpec, pp: int, microbatches: int, stages_per_rank: int
) -> Iterator[Problem]:
    if pp < 1:
        yield Problem("parallel.pp", pp, "a pipeline has at least 1 rank", "use 1 or more")
    if microbatches < 1:
        yield Problem(
            "gradient_accumulation_steps",
            microbatches,
            "a pipeline needs at least 1 micro-batch",
            "use 1 or more",
        )
    fewest, most = spec.stages_per_rank
    if stages_per_rank < fewest or (most is not None and stages_per_rank > most):
        allowed = f"at least {fewest}"
        if fewest == most:
            allowed = f"exactly {fewest}"

        remedy = f"use {fewest}"
        if most is None:
            remedy += " or more"
        alternatives = []
        for other, other_spec in SCHEDULES.items():
            if (
                other_spec.stages_per_rank[0]
                <= stages_per_rank
                <= (other_spec.stages_per_rank[1] or stages_per_rank)
            ):
                alternatives.append(other)
        if alternatives:
            remedy += f", or one of {', '.join(alternatives)}"
        yield Problem(
            "parallel.pipeline.stages_per_rank",
            stages_per_rank,
            f"{name} has {allowed} on a rank",
            remedy,
        )
    elif name in _MICROBATCH_RULES and pp >= 1 and microbatches >= 1:
        yield from _MICROBATCH_RULES[name](name, pp, microbatches)


def _equal_rounds(name: str, pp: int, microbatches: int) -> Iterator[Problem]:
    """Yield a problem if torch cannot divide the micro-batches into equal rounds.

    There are microbatches // pp rounds, but at least one.
    """

    def works(count: int) -> bool:
        return count % max(1, count // pp) == 0

    if not works(microbatches):
        below = next(count for count in range(microbatches, 0, -1) if works(count))
        above = next(count for count in range(microbatches, 2 * microbatches + pp) if works(count))
        rounds = microbatches // pp
        rule = (
            f"{name} with pp {pp} takes micro-batches in {microbatches} // {pp} = {rounds} equal"
            f" rounds, and {microbatches} % {rounds} != 0"
        )
        yield Problem("gradient_accumulation_steps", microbatches, rule, f"use {below} or {above}")


def _at_least_stages(name: str, pp: int, microbatches: int) -> Iterator[Problem]:
    if microbatches < 2 * pp:
        rule = f"{name} with pp {pp} has {2 * pp} stages and needs as many micro-batches"
        yield Problem(
            "gradient_accumulation_steps",
            microbatches,
            rule,
            f"use {2 * pp} or more, or the schedule zbv, which takes any number",
        )


_MICROBATCH_RULES: Mapping[str, Callable[[str, int, int], Iterator[Problem]]] = MappingProxyType(
    {
        "interleaved-1f1b": _equal_rounds,
        "interleaved-zero-bubble": _equal_rounds,
        "dualpipev": _at_least_stages,
    }
)


def in_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield every (rank, action) in an order in which the table can be run.

    Each rank keeps its order, and each action comes after all that it needs. A rank continues until
    it must wait for another one.

    Raises:
        InputError: The ranks deadlock. The error names what each rank waits for.
    """
    numbers = MessageNumbers(stages=schedule.stages, microbatches=schedule.microbatches)
    done = bytearray(numbers.size)
    positions = [0] * len(schedule.ranks)
    # Ranks that wait for each message. They are looked at again when it exists, so that the loop
    # is linear in the size of the table.
    waiting: dict[int, list[int]] = {}
    ready = list(reversed(range(len(schedule.ranks))))
    while ready:
        rank = ready.pop()
        row = schedule.ranks[rank]
        while positions[rank] < len(row):
            action = row[positions[rank]]
            missing = None
            for message in numbers.needed_by(action):
                if not done[message]:
                    missing = message
                    break
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break

            yield rank, action
            positions[rank] += 1
            produced = numbers.produced_by(action)
            if produced is not None:
                done[produced] = 1
                ready.extend(waiting.pop(produced, ()))

    if waiting:
        stuck = [
            f"rank {rank} at {schedule.ranks[rank][positions[rank]]} for {numbers.message(number)}"
            for number, ranks in waiting.items()
            for rank in ranks
        ]
        more = ""
        if len(stuck) > 4:
            more = f" (and {len(stuck) - 4} more)"
        raise _malformed(schedule, f"ranks deadlock: {'; '.join(stuck[:4])}{more}")


def messages(schedule: Schedule) -> dict[tuple[int, int], tuple[Message, ...]]:
    """Return the messages of every (source, destination) pair of ranks.

    They are in the order in which the source produces them, so receives posted in this order match
    the sends. Pairs without messages are left out, and stages on the same rank send none.
    """
    numbers = MessageNumbers(stages=schedule.stages, microbatches=schedule.microbatches)
    messages_of: dict[tuple[int, int], list[Message]] = {}
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            produced = numbers.produced_by(action)
            if produced is None:
                continue
            message = numbers.message(produced)
            to = destination(schedule, message)
            if to is not None:
                messages_of.setdefault((rank, to), []).append(message)
    return {pair: tuple(messages_of[pair]) for pair in sorted(messages_of)}


def destination(schedule: Schedule, message: Message) -> int | None:
    """Return the other rank that receives a message.

    The result is None at the end of the pipeline, and if the next stage is on the same rank.
    """
    if message.payload is Payload.ACTIVATION:
        receiver = message.stage + 1
    else:
        receiver = message.stage - 1
    if not 0 <= receiver < schedule.stages:
        return None
    rank = schedule.stage_ranks[receiver]
    if rank == schedule.stage_ranks[message.stage]:
        return None
    return rank


class MessageNumbers:
    """Numbering of the messages of a pipeline, from 0.

    A number is an index into lists with one entry per message. This is several times faster than
    looking up messages in a set, and a table has tens of thousands of messages.
    """

    def __init__(self, *, stages: int, microbatches: int) -> None:
        self._microbatches = microbatches
        self._stages = stages
        self.gradients = stages * microbatches
        """Number of the first gradient. Activations come before it."""

    @property
    def size(self) -> int:
        """Number of messages."""
        return 2 * self.gradients

    def needed_by(self, action: Action) -> tuple[int, ...]:
        """Return the numbers of the messages that must exist before a computation can start.

        If a backward needs two messages, the activation for its own stage is listed before the
        gradient from the next stage.
        """
        index = action.stage * self._microbatches + action.microbatch
        kind = action.kind
        if kind is Kind.FORWARD:
            # The first stage reads the batch.
            if action.stage == 0:
                return ()
            return (index - self._microbatches,)
        # The second half of a backward needs the first half of the same stage only.
        if kind is Kind.WEIGHT:
            return (self.gradients + index,)
        # The last stage computes the loss, so no other stage sends it a gradient.
        if action.stage == self._stages - 1:
            return (index,)
        return (index, self.gradients + index + self._microbatches)

    def produced_by(self, action: Action) -> int | None:
        """Return the index of the message that an action produces, or None for W."""
        if action.kind is Kind.WEIGHT:
            return None
        index = action.stage * self._microbatches + action.microbatch
        if action.kind is Kind.FORWARD:
            return index
        return self.gradients + index

    def stage(self, number: int) -> int:
        """Return the stage that produces a message."""
        return number % self.gradients // self._microbatches

    def message(self, number: int) -> Message:
        """Return the message whose number is `number`."""
        payload = Payload.GRADIENT
        if number < self.gradients:
            payload = Payload.ACTIVATION
        return Message(payload, self.stage(number), number % self._microbatches)


def _check_shape(schedule: Schedule) -> None:
    if len(schedule.ranks) != schedule.pp:
        raise _malformed(schedule, f"the table has {len(schedule.ranks)} ranks")
    if set(schedule.stage_ranks) != set(range(schedule.pp)):
        raise _malformed(
            schedule,
            f"stages are on ranks {sorted(set(schedule.stage_ranks))}, and every rank from 0 to pp"
            " - 1 needs one",
        )
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            if not (
                0 <= action.stage < schedule.stages
                and 0 <= action.microbatch < schedule.microbatches
            ):
                raise _malformed(
                    schedule, f"rank {rank} has {action}, but there are {schedule.stages} stages"
                )
            if schedule.stage_ranks[action.stage] != rank:
                raise _malformed(
                    schedule,
                    f"rank {rank} has {action}, and stage {action.stage} is on rank"
                    f" {schedule.stage_ranks[action.stage]}",
                )


_COMPLETE = ({Kind.FORWARD, Kind.BACKWARD}, {Kind.FORWARD, Kind.INPUT, Kind.WEIGHT})


def _check_counts(schedule: Schedule) -> None:
    kinds_of: dict[tuple[int, int], set[Kind]] = {}
    for row in schedule.ranks:
        for action in row:
            kinds = kinds_of.setdefault((action.stage, action.microbatch), set())
            if action.kind in kinds:
                raise _malformed(schedule, f"{action} occurs twice")
            kinds.add(action.kind)
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            kinds = kinds_of.get((stage, microbatch), set())
            if kinds not in _COMPLETE:
                names = ", ".join(sorted(kinds)) or "nothing"
                raise _malformed(
                    schedule,
                    f"stage {stage} has {names} of micro-batch {microbatch}; it needs F, and"
                    " either B or both I and W",
                )


def _malformed(schedule: Schedule, problem: str) -> InputError:
    return InputError(
        f"schedule {schedule.name} with pp {schedule.pp} and {schedule.microbatches} micro-batches:"
        f" {problem}; correct the table, or create it with make_schedule"
    )
