"""Pipeline schedules as tables: which computation every pp rank does, in which order. Nothing here
runs a model.

The runtime, the simulator (`timeline.py`), the drawing and the tests read the same `Schedule`.
GPipe and 1F1B are written here; the others come from torch's own generators, without a process
group. Every table that `make_schedule` returns has passed `Schedule.check`: each stage does each
micro-batch forward and backward exactly once, and no rank waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Literal

from plait._torch.pipelining import schedule_actions
from plait.errors import ConfigError, InputError, Problem
from plait.parallel.schedules.actions import Action, Kind, Message, Numbered, Payload


@dataclass(frozen=True)
class Schedule:
    """A table of computations. Moving tensors between ranks is not in it: `messages` derives
    that.
    """

    name: str
    pp: int
    """Number of pipeline ranks."""
    microbatches: int
    """Micro-batches of one optimizer step."""
    stage_ranks: tuple[int, ...]
    """The pp rank of each stage; its length is the number of stages."""
    ranks: tuple[tuple[Action, ...], ...]
    """What each pp rank does, in order."""

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.stage_ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on a pp rank, first stage of the model first."""
        return tuple(stage for stage, at in enumerate(self.stage_ranks) if at == rank)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is done as I and W, so that a runtime must be able to halve it."""
        return any(action.kind in (Kind.INPUT, Kind.WEIGHT) for row in self.ranks for action in row)

    def check(self) -> None:
        """Raise InputError unless this table can be run: complete, every action once and on its
        stage's rank, no rank waiting for ever.
        """
        _check_shape(self)
        _check_counts(self)
        for _ in in_order(self):
            pass


def _malformed(schedule: Schedule, what: str) -> InputError:
    return InputError(
        f"schedule {schedule.name} with pp {schedule.pp} and {schedule.microbatches} micro-batches:"
        f" {what}"
    )


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
                    schedule, f"rank {rank} does {action}, and there are {schedule.stages} stages"
                )
            if schedule.stage_ranks[action.stage] != rank:
                raise _malformed(
                    schedule,
                    f"rank {rank} does {action}, and stage {action.stage} is on rank"
                    f" {schedule.stage_ranks[action.stage]}",
                )


_COMPLETE = ({Kind.FORWARD, Kind.BACKWARD}, {Kind.FORWARD, Kind.INPUT, Kind.WEIGHT})


def _check_counts(schedule: Schedule) -> None:
    found: dict[tuple[int, int], set[Kind]] = {}
    for row in schedule.ranks:
        for action in row:
            kinds = found.setdefault((action.stage, action.microbatch), set())
            if action.kind in kinds:
                raise _malformed(schedule, f"{action} is done twice")
            kinds.add(action.kind)
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            kinds = found.get((stage, microbatch), set())
            if kinds not in _COMPLETE:
                has = ", ".join(sorted(kinds)) or "nothing"
                raise _malformed(
                    schedule,
                    f"stage {stage} does {has} of micro-batch {microbatch}; it must do F, and"
                    " either B or both I and W",
                )


def in_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Every (rank, action) in an order in which the table can be run: each rank in its own order,
    each action after all that it needs.

    A rank goes on until it must wait for another. Raises InputError, naming what each rank waits
    for, where all ranks wait.
    """
    numbered = Numbered(stages=schedule.stages, microbatches=schedule.microbatches)
    done = bytearray(numbered.size)
    at = [0] * len(schedule.ranks)
    waiting: dict[int, list[int]] = {}
    ready = list(reversed(range(len(schedule.ranks))))
    while ready:
        rank = ready.pop()
        row = schedule.ranks[rank]
        while at[rank] < len(row):
            action = row[at[rank]]
            missing = None
            for need in numbered.needed_by(action):
                if not done[need]:
                    missing = need
                    break
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, action
            at[rank] += 1
            made = numbered.produced_by(action)
            if made is not None:
                done[made] = 1
                if made in waiting:
                    ready.extend(waiting.pop(made))
    if waiting:
        stuck = [
            f"rank {rank} at {schedule.ranks[rank][at[rank]]} for {numbered.message(number)}"
            for number, ranks in waiting.items()
            for rank in ranks
        ]
        more = f" (and {len(stuck) - 4} more)" if len(stuck) > 4 else ""
        raise _malformed(schedule, f"ranks deadlock: {'; '.join(stuck[:4])}{more}")


def messages(schedule: Schedule) -> dict[tuple[int, int], tuple[Message, ...]]:
    """What every (source, destination) pair of ranks passes on, in the order in which the source
    produces it.

    Receives posted in this order match the sends. Stages on the same rank pass nothing, and pairs
    without messages are left out.
    """
    numbered = Numbered(stages=schedule.stages, microbatches=schedule.microbatches)
    found: dict[tuple[int, int], list[Message]] = {}
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            made = numbered.produced_by(action)
            if made is None:
                continue
            message = numbered.message(made)
            to = destination(schedule, message)
            if to is not None:
                found.setdefault((rank, to), []).append(message)
    return {pair: tuple(found[pair]) for pair in sorted(found)}


def destination(schedule: Schedule, message: Message) -> int | None:
    """The other rank that a message goes to; None at the end of the pipeline and where the next
    stage is on the same rank.
    """
    reader = message.stage + (1 if message.payload is Payload.ACTIVATION else -1)
    if (
        not 0 <= reader < schedule.stages
        or schedule.stage_ranks[reader] == schedule.stage_ranks[message.stage]
    ):
        return None
    return schedule.stage_ranks[reader]


@dataclass(frozen=True)
class ScheduleSpec:
    """What is known of a schedule by its name."""

    summary: str
    stages_per_rank: tuple[int, int | None]
    """The fewest and the most stages a rank may have; None for any number."""
    placement: Literal["loop", "v"] = "loop"
    """`loop`: stage s is on rank s % pp. `v`: stages s and 2 pp - 1 - s are on rank s, so that rank
    0 has both ends.
    """
    generator: str | None = None
    """The class of torch that makes the table; None where it is made here."""
    splits_backward: bool = False
    """Whether gradients of weights are computed apart from those of inputs."""

    @property
    def default_stages_per_rank(self) -> int:
        """The only choice where there is one, otherwise 2."""
        fewest, most = self.stages_per_rank
        return fewest if most == fewest else 2


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
            "1F1B over several stages a rank: the bubble divided by their number, for as many times"
            " the messages",
            (2, None),
            generator="ScheduleInterleaved1F1B",
        ),
        "looped-bfs": ScheduleSpec(
            "GPipe over several stages a rank: one stage after the other, all micro-batches in a"
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
"""Name to what is known of the schedule."""


def make_schedule(
    name: str, *, pp: int, microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """The checked table of a schedule. `stages_per_rank` None takes the schedule's default: 1, or 2
    where it takes several.

    Raises ConfigError, with what works instead, where the schedule does not exist for these
    numbers.
    """
    spec = SCHEDULES.get(name)
    if spec is None:
        near = get_close_matches(name.lower().replace("_", "-"), SCHEDULES, n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(SCHEDULES)}"
        raise ConfigError(
            Problem(
                "parallel.pipeline.schedule",
                name,
                f"it is not one of {', '.join(SCHEDULES)}",
                remedy,
            )
        )
    each = spec.default_stages_per_rank if stages_per_rank is None else stages_per_rank
    problems = problems_of(name, pp=pp, microbatches=microbatches, stages_per_rank=each)
    if problems:
        raise ConfigError(*problems)
    schedule = Schedule(
        name, pp, microbatches, _placed(spec, pp, each), _rows(name, pp, microbatches, each)
    )
    schedule.check()
    return schedule


def row_of(
    name: str, *, pp: int, microbatches: int, stages_per_rank: int, rank: int
) -> tuple[Action, ...]:
    """One rank's row of the table that `make_schedule` returns for the same numbers, which are not
    checked again; without the others it is made in a fraction of the time.
    """
    return _rows(name, pp, microbatches, stages_per_rank, only=rank)[rank]


def _rows(
    name: str, pp: int, microbatches: int, each: int, *, only: int | None = None
) -> tuple[tuple[Action, ...], ...]:
    generator = SCHEDULES[name].generator
    if generator is None:
        return tuple(
            tuple(_WRITTEN_HERE[name](rank, pp, microbatches)) if only in (None, rank) else ()
            for rank in range(pp)
        )
    table = schedule_actions(
        generator, pp=pp, stages_per_rank=each, microbatches=microbatches, only=only
    )
    return tuple(
        (
            tuple(Action(stage, Kind(kind), microbatch) for stage, kind, microbatch in row)
            if only in (None, rank)
            else ()
        )
        for rank, row in enumerate(table)
    )


def problems_of(
    name: str, *, pp: int, microbatches: int, stages_per_rank: int
) -> tuple[Problem, ...]:
    """Why a schedule of SCHEDULES does not exist for these numbers; empty where it does. Makes no
    table.
    """
    return tuple(_problems(name, SCHEDULES[name], pp, microbatches, stages_per_rank))


def _problems(
    name: str, spec: ScheduleSpec, pp: int, microbatches: int, each: int
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
    if each < fewest or (most is not None and each > most):
        allowed = f"exactly {fewest}" if fewest == most else f"at least {fewest}"
        others = ", ".join(
            other
            for other, it in SCHEDULES.items()
            if it.stages_per_rank[0] <= each <= (it.stages_per_rank[1] or each)
        )
        remedy = (
            f"use {fewest}"
            + (" or more" if most is None else "")
            + (f", or one of {others}" if others else "")
        )
        yield Problem(
            "parallel.pipeline.stages_per_rank", each, f"{name} has {allowed} on a rank", remedy
        )
    elif pp >= 1 and microbatches >= 1:
        yield from _MICROBATCHES.get(name, _any_number)(name, pp, microbatches)


def _any_number(name: str, pp: int, microbatches: int) -> Iterator[Problem]:
    yield from ()


def _whole_rounds(name: str, pp: int, microbatches: int) -> Iterator[Problem]:
    """Torch cuts the micro-batches into m // pp rounds (at least one) of equal size."""

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


_MICROBATCHES: Mapping[str, Callable[[str, int, int], Iterator[Problem]]] = MappingProxyType(
    {
        "interleaved-1f1b": _whole_rounds,
        "interleaved-zero-bubble": _whole_rounds,
        "dualpipev": _at_least_stages,
    }
)


def _placed(spec: ScheduleSpec, pp: int, each: int) -> tuple[int, ...]:
    if spec.placement == "v":
        return (*range(pp), *reversed(range(pp)))
    return tuple(range(pp)) * each


def _gpipe(rank: int, pp: int, microbatches: int) -> Iterator[Action]:
    """Huang et al. 2019, arXiv:1811.06965."""
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for microbatch in range(microbatches):
            yield Action(rank, kind, microbatch)


def _one_forward_one_backward(rank: int, pp: int, microbatches: int) -> Iterator[Action]:
    """PipeDream-Flush, Narayanan et al. 2021, arXiv:2104.04473: a rank runs ahead by one forward
    for every rank behind it.
    """
    ahead = min(microbatches, pp - 1 - rank)
    for microbatch in range(ahead):
        yield Action(rank, Kind.FORWARD, microbatch)
    for microbatch in range(microbatches):
        if ahead + microbatch < microbatches:
            yield Action(rank, Kind.FORWARD, ahead + microbatch)
        yield Action(rank, Kind.BACKWARD, microbatch)


_WRITTEN_HERE: Mapping[str, Callable[[int, int, int], Iterator[Action]]] = MappingProxyType(
    {"gpipe": _gpipe, "1f1b": _one_forward_one_backward}
)
