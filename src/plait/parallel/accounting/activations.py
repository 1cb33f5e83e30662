"""Activations that a rank holds, block by block and for every recomputation mode: figures of its
stages, put together along its row of the schedule. No tensors. Without a pipeline a rank has one
stage, and one micro-batch after the other goes through it (`ONE_STAGE`).

A rank of a pipeline holds several micro-batches, as many as the schedule and its place say, so a
budget for activations bounds their sum at the worst point of the row. Where a backward is split, a
stage holds something else between its halves: what the first half made (recomputed activations
among it) waits for the second.

`dryrun.rank_activations` measures the figures. Bytes are those of distinct storages that are
neither parameters nor buffers nor the batch itself. A block's input belongs to the block, so blocks
in different modes add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from plait.parallel.schedules.actions import Action, Kind
from plait.parallel.schedules.schedule import Schedule

BlockMode = Literal["none", "selective", "full"]
"""none: everything that backward needs is kept; selective: the results of chosen operators; full:
the input alone.
"""
ONE_STAGE = Schedule(
    "one stage", 1, 1, (0,), ((Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD, 0)),)
)
"""A model without a pipeline."""
Assignment = tuple[BlockMode, ...]
"""The mode of every block of a rank, in the order of its stages."""


@dataclass(frozen=True)
class StageMode:
    """One micro-batch through a stage with all its blocks in one mode, in bytes. A figure a block,
    or of all that is outside of them.
    """

    kept: tuple[int, ...]
    """By a block on the device, from forward to backward, its input included."""
    outside: int
    """Saved before and outside of the blocks: embedding, positions, masks; boundary activations,
    except on the last stage.
    """
    head: int
    """By what follows the last block: final norm, head and loss, the last block's output included.
    """
    returning: tuple[int, ...]
    """Tensors that a block's backward recomputes, or prefetches from a store."""
    flops: int
    """Operations of forward and backward, what is recomputed included: matrix products and
    attention.
    """
    traffic: Mapping[str, int] = field(default_factory=dict)
    """What forward and backward send over the tp axis, by collective."""
    peak: int = 0
    """The most that forward and backward hold at once: all of the above, what is recomputed, and
    temporaries; gradients of parameters are counted until they are accumulated.
    """
    stored: tuple[int, ...] = ()
    """What a block puts into a store; empty where none does."""
    deferred: tuple[int, ...] = ()
    """By a block, from the first half of a split backward to the second; empty where no backward of
    the stage is split.
    """
    deferred_outside: int = 0


@dataclass(frozen=True)
class StageFacts:
    """A stage in every mode that was measured."""

    modes: Mapping[BlockMode, StageMode]
    received: int = 0
    """Bytes that it gets from the stage before, which are counted in both where both are on one
    rank.
    """
    differentiable: bool = False
    """Whether a gradient goes back to a stage before; without one, a split backward is a second
    half alone.
    """

    @property
    def blocks(self) -> int:
        """How many."""
        return len(self.modes["none"].kept)

    def kept(self, assignment: Assignment) -> int:
        """Bytes of one micro-batch by the blocks on the device, and by what is before and outside
        of them, where block i is in mode `assignment[i]`.
        """
        # a recomputed block keeps shared arguments too
        outside = max(self.modes[mode].outside for mode in {"none", *assignment})
        return outside + sum(self.modes[mode].kept[index] for index, mode in enumerate(assignment))

    def returning(self, assignment: Assignment) -> int:
        """The peak bytes that the backward of one block recomputes or prefetches."""
        return max(
            (0, *(self.modes[mode].returning[index] for index, mode in enumerate(assignment)))
        )

    def stored(self, assignment: Assignment) -> int:
        """Bytes of one micro-batch that blocks put into a store."""
        return sum(
            self.modes[mode].stored[index]
            for index, mode in enumerate(assignment)
            if self.modes[mode].stored
        )

    def repeated(self, assignment: Assignment) -> float:
        """Operations that one micro-batch repeats. Blocks count as equal."""
        more = {mode: one.flops - self.modes["none"].flops for mode, one in self.modes.items()}
        return sum(more[mode] for mode in assignment) / max(1, len(assignment))

    def repeated_traffic(self, assignment: Assignment) -> dict[str, int]:
        """Bytes that recomputation sends over the tp axis in addition, by collective. Blocks count
        as equal.
        """
        base = self.modes["none"].traffic
        more = dict.fromkeys(self.modes["none"].traffic, 0)
        for mode in set(assignment) - {"none"}:
            for collective, sent in self.modes[mode].traffic.items():
                more[collective] = more.get(collective, 0) + (
                    sent - base.get(collective, 0)
                ) * assignment.count(mode) // len(assignment)
        return more


@dataclass(frozen=True)
class _Stage:
    """A stage with the modes of its blocks decided."""

    kept: int
    deferred: int
    in_backward: int
    """The most besides `kept` during an unsplit backward."""
    in_first_half: int
    in_second_half: int
    """The same besides `deferred`."""
    received: int


def _decided(facts: StageFacts, modes: Assignment) -> _Stage:
    kept = [facts.modes[mode].kept[index] for index, mode in enumerate(modes)]
    returning = [facts.modes[mode].returning[index] for index, mode in enumerate(modes)]
    used = {"none", *modes}
    full = facts.kept(modes) + facts.modes["none"].head
    back = facts.returning(modes)
    deferred = 0
    first = 0
    if facts.modes["none"].deferred:
        later = [facts.modes[mode].deferred[index] for index, mode in enumerate(modes)]
        deferred = max(facts.modes[mode].deferred_outside for mode in used) + sum(later)
        # Blocks behind have had their first half, those before have not.
        grown = [new - old for new, old in zip(later, kept, strict=True)]
        behind = [0, *accumulate(reversed(grown))]
        first = max(
            (
                0,
                deferred - full,
                *(done + come for done, come in zip(behind, reversed(returning), strict=False)),
            )
        )
    if not facts.differentiable:
        return _Stage(full, deferred, back, 0, back, facts.received)
    # The second half computes all of the stage's blocks again before it has done with any.
    again = sum(come for mode, come in zip(modes, returning, strict=True) if mode != "none")
    return _Stage(full, deferred, back, first, again, facts.received)


@dataclass(frozen=True)
class _Moment:
    """What is in flight on a rank, by the position of a stage among the rank's."""

    waiting: tuple[int, ...]
    """Micro-batches between forward and backward."""
    deferred: tuple[int, ...]
    """Micro-batches between the halves of their backward."""
    shared: tuple[int, ...]
    """Micro-batches of the stage whose input is the output of another one of this rank, which has
    it too.
    """
    running: int
    kind: Kind


def _moments(schedule: Schedule, rank: int) -> Iterator[tuple[Action, _Moment, _Moment]]:
    """Every action of a row, with what is in flight while it runs and after it. A micro-batch in
    its backward is still in flight.
    """
    stages = schedule.stages_of(rank)
    place = {stage: index for index, stage in enumerate(stages)}
    state: dict[tuple[int, int], Kind] = {}

    def now(action: Action) -> _Moment:
        def count(*kinds: Kind) -> tuple[int, ...]:
            return tuple(
                sum(at == stage and kind in kinds for (at, _), kind in state.items())
                for stage in stages
            )

        both = tuple(
            sum(at == stage and (stage - 1, microbatch) in state for at, microbatch in state)
            for stage in stages
        )
        return _Moment(
            count(Kind.FORWARD), count(Kind.INPUT), both, place[action.stage], action.kind
        )

    for action in schedule.ranks[rank]:
        key = (action.stage, action.microbatch)
        if action.kind is Kind.FORWARD:
            state[key] = Kind.FORWARD
        during = now(action)
        if action.kind is Kind.INPUT:
            state[key] = Kind.INPUT
        elif action.kind is not Kind.FORWARD:
            del state[key]
        yield action, during, now(action)


def _standing(moment: _Moment, stages: Sequence[_Stage]) -> int:
    held = 0
    for waiting, deferred, shared, stage in zip(
        moment.waiting, moment.deferred, moment.shared, stages, strict=True
    ):
        held += waiting * stage.kept + deferred * stage.deferred - shared * stage.received
    return held


def _most(moments: Iterable[_Moment], stages: Sequence[_Stage]) -> int:
    extra = {
        Kind.FORWARD: [0 for _ in stages],
        Kind.BACKWARD: [stage.in_backward for stage in stages],
        Kind.INPUT: [stage.in_first_half for stage in stages],
        Kind.WEIGHT: [stage.in_second_half for stage in stages],
    }
    return max(_standing(moment, stages) + extra[moment.kind][moment.running] for moment in moments)


@dataclass(frozen=True)
class RankActivations:
    """The stages of one rank and its row of the schedule."""

    schedule: Schedule
    rank: int
    """On the pp axis."""
    stages: tuple[StageFacts, ...]
    """Of this rank, the model's first one first."""

    @property
    def blocks(self) -> int:
        """How many blocks the rank has."""
        return sum(stage.blocks for stage in self.stages)

    def held_after(self, assignment: Assignment) -> list[tuple[Action, int]]:
        """Every action of the row, and the bytes that all micro-batches in flight keep when it has
        ended: blocks, what is outside of them, head and loss.
        """
        stages = self._decided(assignment)
        return [
            (action, _standing(after, stages))
            for action, _, after in _moments(self.schedule, self.rank)
        ]

    def most(self, assignment: Assignment) -> int:
        """What a budget limits: the peak of the saved tensors, together with the recomputed or
        prefetched tensors of one block's backward.
        """
        return _most(self._different(), self._decided(assignment))

    def most_in_flight(self) -> float:
        """Micro-batches through all stages of the rank that are held at most."""
        return max(
            sum(moment.waiting) + sum(moment.deferred) for moment in self._different()
        ) / len(self.stages)

    def solve(self, budget_bytes: int) -> Assignment | None:
        """The modes that repeat the fewest operations within the budget; None where there are none.

        Blocks of a stage count as equal, so only how many are in which mode matters. The first
        blocks of a rank keep least: their forward comes first and their backward last.
        """
        moments = self._different()
        best: tuple[float, int, Assignment] | None = None
        for assignment in self.candidates():
            work = self.repeated(assignment)
            if best is not None and work > best[0]:
                continue
            most = _most(moments, self._decided(assignment))
            if most <= budget_bytes and (best is None or (work, most) < best[:2]):
                best = (work, most, assignment)
        return best[2] if best else None

    def least(self) -> tuple[int, Assignment]:
        """The smallest budget that can be kept, and how."""
        moments = self._different()
        return min(
            (_most(moments, self._decided(assignment)), assignment)
            for assignment in self.candidates()
        )

    def candidates(self) -> Iterator[Assignment]:
        """What is chosen among."""
        count = self.blocks
        several = all("selective" in stage.modes for stage in self.stages)
        for full in range(count + 1):
            for selective in range(count - full + 1 if several else 1):
                yield (
                    *_alike("full", full),
                    *_alike("selective", selective),
                    *_alike("none", count - full - selective),
                )

    def repeated(self, assignment: Assignment) -> float:
        """Operations that one micro-batch repeats."""
        return sum(stage.repeated(modes) for stage, modes in self._split(assignment))

    def _different(self) -> set[_Moment]:
        return {during for _, during, _ in _moments(self.schedule, self.rank)}

    def _decided(self, assignment: Assignment) -> list[_Stage]:
        return [_decided(stage, modes) for stage, modes in self._split(assignment)]

    def _split(self, assignment: Assignment) -> Iterator[tuple[StageFacts, Assignment]]:
        if len(assignment) != self.blocks:
            raise ValueError(f"{len(assignment)} modes for {self.blocks} blocks")
        start = 0
        for stage in self.stages:
            yield stage, assignment[start : start + stage.blocks]
            start += stage.blocks


def _alike(mode: BlockMode, count: int) -> Assignment:
    return (mode,) * count
