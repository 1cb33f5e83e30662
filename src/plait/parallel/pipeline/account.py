"""The ledger of one rank of a pipeline, and what it holds unsharded after every computation of its
schedule.

A rank's parameters are those of its stages; on them the accounts of all techniques hold as without
a pipeline. What differs is counted from the schedule's table: how often the root unit (what is
outside of the blocks) is gathered and reduced, what is held between computations, and what is sent
to other stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from plait.model.facts import ModelFacts, ParameterFacts
from plait.model.outer_units import OuterUnits
from plait.model.plans import TensorPlan
from plait.model.stages import StageCut
from plait.parallel.accounting.ledger import Ledger, StageCounts, part_of
from plait.parallel.accounting.zero_rule import of_block, of_root
from plait.parallel.pipeline.balance import forward_costs, imbalance, stage_costs
from plait.parallel.schedules.actions import Action, Kind
from plait.parallel.schedules.schedule import Schedule, messages


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds unsharded after a computation."""

    action: Action
    gathered_parameters: int
    unsharded_gradients: int


def facts_of_rank(facts: ModelFacts, cut: StageCut, stages: Sequence[int]) -> ModelFacts:
    """What of the model is on a rank with these stages; tied parameters of several stages on each
    of them.
    """
    own = set(stages)
    blocks = tuple(
        name for stage in stages for name in cut.blocks[cut.bounds[stage] : cut.bounds[stage + 1]]
    )
    unit = {facts.blocks.index(name): index for index, name in enumerate(blocks)}
    kept = [
        replace(p, unit=unit.get(p.unit, -1)) for p in facts.parameters if cut.owners[p.name] & own
    ]
    plan = None if facts.tensor_plan is None else _plan_of_rank(facts.tensor_plan, cut, own, blocks)
    experts = facts.experts
    if experts is not None:
        here = {p.name for p in kept}
        experts = replace(
            experts, parameters=tuple(name for name in experts.parameters if name in here)
        )
    # In a pipeline everything outside of the blocks is one unit (`data.shard_units`).
    return replace(
        facts,
        parameters=tuple(kept),
        blocks=blocks,
        tensor_plan=plan,
        experts=experts,
        outer=OuterUnits(),
    )


def _plan_of_rank(
    plan: TensorPlan, cut: StageCut, own: set[int], blocks: tuple[str, ...]
) -> TensorPlan:
    """The modules that run on these stages. A tied weight has two modules: one runs on the first
    stage, the other on the last.
    """

    def runs(module: str) -> bool:
        if any(module.startswith(f"{block}.") for block in cut.blocks):
            return any(module.startswith(f"{block}.") for block in blocks)
        inside = [name for name in cut.owners if name.startswith(f"{module}.")]
        again = {stage for name in inside for stage in cut.recomputed.get(name, ())}
        in_front = any(name in cut.first_stage for name in inside)
        return bool(({0 if in_front else cut.stages - 1} | again) & own)

    return replace(
        plan,
        modules=tuple(entry for entry in plan.modules if runs(entry.name)),
        norms=tuple(name for name in plan.norms if runs(name)),
        whole=tuple(name for name in plan.whole if runs(name)),
    )


def stage_counts(
    schedule: Schedule,
    rank: int,
    *,
    cut: StageCut,
    facts: ModelFacts,
    boundary_bytes: int,
    ledger: Ledger,
) -> StageCounts:
    """The counts of a rank, as arrays that fit `ledger` (one candidate). `facts` is the whole
    model's.
    """
    like = np.ones_like(ledger.dp_shard)
    sends = sum(len(sent) for (source, _), sent in messages(schedule).items() if source == rank)
    ends = cut.outside_stages() & set(schedule.stages_of(rank))
    return StageCounts(
        root_gathers=like * _root_gathers(schedule.ranks[rank]),
        ends=like * len(ends),
        root_reduces=like * (len(ends) * schedule.microbatches),
        sends=like * sends,
        boundary_bytes=like * boundary_bytes,
        shared_bytes=like * _shared_bytes(schedule, rank, cut, facts, ledger),
    )


def _root_gathers(row: Iterable[Action]) -> int:
    """At ZeRO stage 3 every computation needs the root gathered, and every backward frees it."""
    count = 0
    gathered = False
    for action in row:
        count += not gathered
        gathered = action.kind is Kind.FORWARD
    return count


def _shared_bytes(
    schedule: Schedule, rank: int, cut: StageCut, facts: ModelFacts, ledger: Ledger
) -> int:
    """2 (n - 1) / n of this rank's part of every gradient that n ranks of the pipeline share."""
    total = 0
    for parameter in facts.trainable:
        ranks = {schedule.stage_ranks[stage] for stage in cut.owners[parameter.name]}
        if len(ranks) > 1 and rank in ranks:
            dim = facts.tensor_plan.dims[parameter.name] if facts.tensor_plan is not None else None
            total += 2 * (len(ranks) - 1) * _local_bytes(parameter, dim, ledger) // len(ranks)
    return total


def _local_bytes(parameter: ParameterFacts, dim: int | None, ledger: Ledger) -> int:
    """Bytes of a rank's part of a parameter that tp splits along `dim`, and dp_shard along the
    first dimension.
    """
    part = part_of(parameter.shape, dim, ledger)
    return int(part.held[0] * part.row[0]) * parameter.itemsize


def held_after(
    schedule: Schedule,
    rank: int,
    *,
    zero: int,
    facts: ModelFacts,
    cut: StageCut,
    gathered: dict[str, int],
    gradients: dict[str, int],
) -> list[Held]:
    """What is unsharded after every computation of a rank, in the order of its row.

    `facts` is the whole model's; `gathered` and `gradients` are the bytes of every parameter when
    gathered (padding included) and of its unsharded gradient. Nothing is where parameters are
    neither sharded nor cast.
    """
    stages = set(schedule.stages_of(rank))
    unit_stage = {
        name: stage
        for stage in stages
        for name in cut.blocks[cut.bounds[stage] : cut.bounds[stage + 1]]
    }
    blocks: dict[int, list[str]] = {stage: [] for stage in stages}
    root: dict[str, set[int]] = {}
    for parameter in facts.parameters:
        if parameter.unit >= 0:
            if facts.blocks[parameter.unit] in unit_stage:
                blocks[unit_stage[facts.blocks[parameter.unit]]].append(parameter.name)
        elif cut.owners[parameter.name] & stages:
            root[parameter.name] = set(cut.owners[parameter.name] & stages)
    ends = cut.outside_stages() & stages
    left = dict.fromkeys(stages, schedule.microbatches)
    is_gathered: set[str] = set()
    has_gradient: set[str] = set()
    rows = []
    for action in schedule.ranks[rank]:
        stage = action.stage
        is_gathered |= {*blocks[stage], *root}
        if zero == 3:
            is_gathered -= set(blocks[stage])
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            has_gradient |= {
                *blocks[stage],
                *(name for name, users in root.items() if stage in users),
            }
            for names, then in (
                (blocks[stage], of_block(zero, left, ran=stage, own=stage)),
                (root, of_root(zero, left, ran=stage, users=ends)),
            ):
                has_gradient -= set(names) if then.reduce else set()
                is_gathered -= set(names) if then.free else set()
            left[stage] -= 1
        rows.append(
            Held(
                action,
                sum(gathered[name] for name in is_gathered),
                sum(gradients.get(name, 0) for name in has_gradient),
            )
        )
    return rows


@dataclass(frozen=True)
class StageRow:
    """One stage of a cut."""

    stage: int
    rank: int
    """On the pp axis."""
    blocks: tuple[str, ...]
    parameters: int
    """Tied ones on each stage that holds them."""
    cost: float
    """FLOPs of a forward for one token (see `stages.forward_costs`)."""


def stage_rows(schedule: Schedule, cut: StageCut, facts: ModelFacts) -> list[StageRow]:
    """Every stage. `facts` is the whole model's."""
    costs = forward_costs(facts)
    sizes = [after - before for before, after in pairwise(cut.bounds)]
    loads = stage_costs(costs.blocks, sizes, first=costs.first, last=costs.last)
    return [
        StageRow(
            stage,
            schedule.stage_ranks[stage],
            cut.blocks[cut.bounds[stage] : cut.bounds[stage + 1]],
            facts_of_rank(facts, cut, [stage]).numel,
            loads[stage],
        )
        for stage in range(cut.stages)
    ]


def balance(rows: Sequence[StageRow]) -> float:
    """The largest cost of a rank over the mean: 1.0 is even."""
    loads: dict[int, float] = {}
    for row in rows:
        loads[row.rank] = loads.get(row.rank, 0.0) + row.cost
    return imbalance(list(loads.values()))
