"""Bytes of the activations that a rank holds, by block and recompute mode.

The bytes of a rank's stages are combined in the order of the rank's actions in the schedule (its
row). Without a pipeline a rank has one stage, which runs one micro-batch at a time (`ONE_STAGE`).

A pipeline rank holds activations of several micro-batches. Their number depends on the schedule and
the rank's position, so a budget for activations limits the largest sum during any action of the
row. If a backward is split into two halves, a stage holds tensors of the first half, such as
recomputed activations, until the second half.

`dryrun.rank_activations` measures the bytes. It counts every storage once, and leaves out
parameters, buffers and the batch. The input of a block belongs to the block, so the bytes of blocks
in different modes can be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from plait.parallel.schedules.schedule import Action, Kind, Schedule

BlockMode = Literal["none", "selective", "full"]
"""Recomputation mode of a block: what the block keeps from forward to backward.

none: everything that backward needs. selective: the results of selected operators. full: only the
input.
"""


Assignment = tuple[BlockMode, ...]
"""Mode of every block of a rank, in the order of its stages."""


ONE_STAGE = Schedule(
    "one stage", 1, 1, (0,), ((Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD, 0)),)
)
"""Schedule of a model without a pipeline."""


@dataclass(frozen=True)
class StageMode:
    """Bytes of one micro-batch in a stage whose blocks all have the same mode.

    Tuples have one entry per block.
    """

    saved: tuple[int, ...]
    """Bytes that a block keeps on the device from forward to backward, its input included."""
    outside: int
    """Bytes that are saved before and outside the blocks: embedding, positions, masks.

    Boundary activations are included, except on the last stage.
    """
    head: int
    """Bytes after the last block: final norm, head and loss, the last block's output included."""
    restored: tuple[int, ...]
    """Bytes that the backward of a block recomputes, or prefetches from a store."""
    flops: int
    """Operations of forward, backward and recomputation in matrix products and attention."""
    traffic: Mapping[str, int] = field(default_factory=dict)
    """Bytes that forward and backward send over the tp axis, by collective."""
    peak: int = 0
    """Most bytes that forward and backward hold at once.

    They include all of the above, recomputed tensors and temporaries. Gradients of parameters are
    counted until they are accumulated.
    """
    stored: tuple[int, ...] = ()
    """Bytes that a block puts into a store. Empty if no block does."""
    deferred: tuple[int, ...] = ()
    """Bytes that a block keeps between the halves of a split backward. Empty without a split."""
    deferred_outside: int = 0
    """Bytes outside the blocks that are kept between the halves of a split backward."""


@dataclass(frozen=True)
class StageFacts:
    """Bytes of one stage in every recompute mode, as the dry run measures them."""

    modes: Mapping[BlockMode, StageMode]
    received: int = 0
    """Bytes from the previous stage, which are counted in both stages if both are on one rank."""
    differentiable: bool = False
    """True if the stage sends a gradient to a previous one.

    Otherwise a split backward consists only of its second half.
    """

    @property
    def blocks(self) -> int:
        """Number of blocks of the stage."""
        return len(self.modes["none"].saved)

    def saved(self, assignment: Assignment) -> int:
        """Return the bytes that one micro-batch keeps on the device, without those of the head.

        Args:
            assignment: The mode of each block of the stage.
        """
        # A recomputed block keeps shared arguments alive.
        outside = max(self.modes[mode].outside for mode in {"none", *assignment})
        return outside + sum(self.modes[mode].saved[index] for index, mode in enumerate(assignment))

    def restored(self, assignment: Assignment) -> int:
        """Return the most bytes that the backward of a single block recomputes or prefetches."""
        restored = [self.modes[mode].restored[index] for index, mode in enumerate(assignment)]
        return max(restored, default=0)

    def stored(self, assignment: Assignment) -> int:
        """Return the bytes of one micro-batch that blocks move to an activation store."""
        return sum(
            self.modes[mode].stored[index]
            for index, mode in enumerate(assignment)
            if self.modes[mode].stored
        )

    def repeated(self, assignment: Assignment) -> float:
        """Return the FLOPs that one micro-batch recomputes, assuming equal blocks."""
        base = self.modes["none"].flops
        additional = {mode: figures.flops - base for mode, figures in self.modes.items()}
        return sum(additional[mode] for mode in assignment) / max(1, len(assignment))

    def repeated_traffic(self, assignment: Assignment) -> dict[str, int]:
        """Return the bytes that recomputation sends over tp, by collective.

        All blocks are assumed to be equal.
        """
        base = self.modes["none"].traffic
        repeated = dict.fromkeys(base, 0)
        for mode in set(assignment) - {"none"}:
            blocks = assignment.count(mode)
            for collective, sent in self.modes[mode].traffic.items():
                additional = sent - base.get(collective, 0)
                share = additional * blocks // len(assignment)
                repeated[collective] = repeated.get(collective, 0) + share
        return repeated


@dataclass(frozen=True)
class RankActivations:
    """Activation memory of one pipeline rank, from its stages and its row of the schedule."""

    schedule: Schedule
    rank: int
    """Rank on the pp axis."""
    stages: tuple[StageFacts, ...]
    """Stages of this rank, in the order of the model."""

    @property
    def blocks(self) -> int:
        """Number of blocks of the rank."""
        return sum(stage.blocks for stage in self.stages)

    def held_after(self, assignment: Assignment) -> list[tuple[Action, int]]:
        """Return every action of the row with the activation bytes that exist after it.

        The bytes include all micro-batches in flight, inside and outside the blocks, and the head
        and loss.
        """
        stages = self._stage_bytes(assignment)
        return [
            (action, _bytes_in_flight(after, stages))
            for action, _, after in _actions_in_flight(self.schedule, self.rank)
        ]

    def peak_bytes(self, assignment: Assignment) -> int:
        """Return the peak of the activations, which a budget limits.

        It consists of the saved tensors, and the tensors that the backward of one block recomputes
        or prefetches.
        """
        return _peak_bytes(self._distinct_in_flight(), self._stage_bytes(assignment))

    def most_in_flight(self) -> float:
        """Return the largest number of micro-batches in flight at once.

        A micro-batch counts as 1 if all stages of the rank hold its activations. Otherwise it
        counts as the fraction of the stages that hold them.
        """
        counts = [
            sum(in_flight.waiting) + sum(in_flight.deferred)
            for in_flight in self._distinct_in_flight()
        ]
        return max(counts) / len(self.stages)

    def solve(self, budget_bytes: int) -> Assignment | None:
        """Return the modes that recompute the fewest FLOPs within the budget, or None.

        All blocks of a stage are assumed to be equal, so only the number of blocks in each mode
        matters. The first blocks of a rank save the least, because their forward comes first and
        their backward last.
        """
        distinct = self._distinct_in_flight()
        best: Assignment | None = None
        best_cost = (float("inf"), 0)
        for assignment in self.candidates():
            flops = self.repeated(assignment)
            if flops > best_cost[0]:
                # Compare the operations first, because the peak takes longer to compute.
                continue
            peak = _peak_bytes(distinct, self._stage_bytes(assignment))
            if peak <= budget_bytes and (flops, peak) < best_cost:
                best_cost = (flops, peak)
                best = assignment
        return best

    def least(self) -> tuple[int, Assignment]:
        """Return (smallest possible budget, modes that meet it)."""
        distinct = self._distinct_in_flight()
        return min(
            (_peak_bytes(distinct, self._stage_bytes(assignment)), assignment)
            for assignment in self.candidates()
        )

    def candidates(self) -> Iterator[Assignment]:
        """Yield the assignments that `solve` chooses from."""
        full_mode: Assignment = ("full",)
        selective_mode: Assignment = ("selective",)
        no_recomputation: Assignment = ("none",)
        has_selective = all("selective" in stage.modes for stage in self.stages)
        for full in range(self.blocks + 1):
            other_blocks = self.blocks - full
            most_selective = other_blocks if has_selective else 0
            for selective in range(most_selective + 1):
                none = other_blocks - selective
                yield full_mode * full + selective_mode * selective + no_recomputation * none

    def repeated(self, assignment: Assignment) -> float:
        """Return the FLOPs that one micro-batch recomputes."""
        return sum(stage.repeated(modes) for stage, modes in self._split(assignment))

    def _distinct_in_flight(self) -> set[_InFlight]:
        """Return the distinct sets of micro-batches in flight during the actions of the row."""
        return {during for _, during, _ in _actions_in_flight(self.schedule, self.rank)}

    def _stage_bytes(self, assignment: Assignment) -> list[_StageBytes]:
        return [_stage_bytes(stage, modes) for stage, modes in self._split(assignment)]

    def _split(self, assignment: Assignment) -> Iterator[tuple[StageFacts, Assignment]]:
        if len(assignment) != self.blocks:
            raise ValueError(
                f"the assignment has {len(assignment)} modes for {self.blocks} blocks; pass one"
                " mode per block"
            )
        start = 0
        for stage in self.stages:
            yield stage, assignment[start : start + stage.blocks]
            start += stage.blocks


@dataclass(frozen=True)
class _InFlight:
    """Micro-batches in flight in each stage of a rank, during or after an action."""

    waiting: tuple[int, ...]
    """Micro-batches between forward and backward."""
    deferred: tuple[int, ...]
    """Micro-batches between the halves of their backward."""
    shared: tuple[int, ...]
    """Micro-batches whose input is the output of another stage of this rank."""
    running: int
    """Position of the action's stage among those of the rank."""
    kind: Kind
    """Kind of the action."""


def _actions_in_flight(
    schedule: Schedule, rank: int
) -> Iterator[tuple[Action, _InFlight, _InFlight]]:
    """Yield every action of a row as (action, in flight while it runs, in flight afterwards).

    A micro-batch in its backward is still in flight.
    """
    stages = schedule.stages_of(rank)
    positions = {stage: index for index, stage in enumerate(stages)}
    # (stage, micro-batch) in flight -> the last computation of it
    in_flight: dict[tuple[int, int], Kind] = {}

    def snapshot(action: Action) -> _InFlight:
        waiting = [0] * len(stages)
        deferred = [0] * len(stages)
        shared = [0] * len(stages)
        for (stage, microbatch), kind in in_flight.items():
            if kind is Kind.FORWARD:
                waiting[positions[stage]] += 1
            else:
                deferred[positions[stage]] += 1
            if (stage - 1, microbatch) in in_flight:
                shared[positions[stage]] += 1
        return _InFlight(
            tuple(waiting), tuple(deferred), tuple(shared), positions[action.stage], action.kind
        )

    for action in schedule.ranks[rank]:
        key = (action.stage, action.microbatch)
        if action.kind is Kind.FORWARD:
            in_flight[key] = Kind.FORWARD
        during = snapshot(action)
        if action.kind is Kind.INPUT:
            in_flight[key] = Kind.INPUT
        elif action.kind is not Kind.FORWARD:
            del in_flight[key]
        yield action, during, snapshot(action)


@dataclass(frozen=True)
class _StageBytes:
    """Bytes of one micro-batch in a stage, for one assignment of modes to its blocks."""

    saved: int
    """Bytes between forward and backward."""
    deferred: int
    """Bytes between the halves of a split backward."""
    in_backward: int
    """Most bytes besides `saved` during an unsplit backward."""
    in_first_half: int
    """Most bytes besides `saved` during the first half of a split backward."""
    in_second_half: int
    """Most bytes besides `deferred` during the second half of a split backward."""
    received: int
    """Bytes from the previous stage. See `StageFacts.received`."""


def _stage_bytes(facts: StageFacts, modes: Assignment) -> _StageBytes:
    saved = [facts.modes[mode].saved[index] for index, mode in enumerate(modes)]
    restored = [facts.modes[mode].restored[index] for index, mode in enumerate(modes)]
    total_saved = facts.saved(modes) + facts.modes["none"].head
    in_backward = facts.restored(modes)

    deferred = 0
    in_first_half = 0
    if facts.modes["none"].deferred:
        block_deferred = [facts.modes[mode].deferred[index] for index, mode in enumerate(modes)]
        outside = max(facts.modes[mode].deferred_outside for mode in {"none", *modes})
        deferred = outside + sum(block_deferred)
        # During the first half of a block, later blocks have had theirs and earlier ones have not.
        growth = [new - old for new, old in zip(block_deferred, saved, strict=True)]
        in_first_half = max(0, deferred - total_saved)
        later_growth = 0
        for block_growth, block_restored in zip(reversed(growth), reversed(restored), strict=True):
            in_first_half = max(in_first_half, later_growth + block_restored)
            later_growth += block_growth
    if not facts.differentiable:
        return _StageBytes(total_saved, deferred, in_backward, 0, in_backward, facts.received)

    # The second half recomputes all blocks of the stage before it frees any.
    in_second_half = sum(
        block_restored
        for mode, block_restored in zip(modes, restored, strict=True)
        if mode != "none"
    )
    return _StageBytes(
        total_saved, deferred, in_backward, in_first_half, in_second_half, facts.received
    )


def _bytes_in_flight(in_flight: _InFlight, stages: Sequence[_StageBytes]) -> int:
    """Return the activation bytes of all micro-batches in flight."""
    total = 0
    for waiting, deferred, shared, stage in zip(
        in_flight.waiting, in_flight.deferred, in_flight.shared, stages, strict=True
    ):
        # A tensor that passes between two stages of this rank exists once.
        total += waiting * stage.saved + deferred * stage.deferred - shared * stage.received
    return total


def _peak_bytes(distinct: Iterable[_InFlight], stages: Sequence[_StageBytes]) -> int:
    """Return the peak of the activation bytes over all actions.

    Bytes that an action itself allocates are included.
    """
    peak = 0
    for in_flight in distinct:
        total = _bytes_in_flight(in_flight, stages)
        running = stages[in_flight.running]
        if in_flight.kind is Kind.BACKWARD:
            total += running.in_backward
        elif in_flight.kind is Kind.INPUT:
            total += running.in_first_half
        elif in_flight.kind is Kind.WEIGHT:
            total += running.in_second_half
        peak = max(peak, total)
    return peak
