"""Ledger of one pipeline rank, and its unsharded memory after every computation of the schedule.

A rank's parameters are those of its stages. On them the accounts of all techniques apply as without
a pipeline. What differs is counted from the schedule's table: how often the root unit (the
parameters outside of the blocks) is gathered and reduced, what stays unsharded between
computations, and what is sent to other stages.
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
from plait.parallel.accounting.ledger import Ledger, StageCounts, parameter_part
from plait.parallel.accounting.zero_rule import after_block_backward, after_root_backward
from plait.parallel.pipeline.balance import forward_costs, imbalance, stage_costs
from plait.parallel.schedules.actions import Action, Kind
from plait.parallel.schedules.schedule import Schedule, messages


@dataclass(frozen=True)
class UnshardedBytes:
    """Bytes that a rank holds unsharded after a computation.

    Attributes:
        action: The computation.
        gathered_parameters: Bytes of gathered parameters.
        unsharded_gradients: Bytes of gradients that were not reduced yet.
    """

    action: Action
    gathered_parameters: int
    unsharded_gradients: int


def facts_of_rank(facts: ModelFacts, cut: StageCut, stages: Sequence[int]) -> ModelFacts:
    """Return the facts of the part of a model that a rank with these stages has.

    Tied parameters of several stages are on each of them.
    """
    rank_stages = set(stages)
    blocks: tuple[str, ...] = ()
    for stage in stages:
        blocks += _blocks_of_stage(cut, stage)
    # Units are renumbered; -1 is the root unit.
    unit_of = {facts.blocks.index(name): index for index, name in enumerate(blocks)}
    parameters = tuple(
        replace(parameter, unit=unit_of.get(parameter.unit, -1))
        for parameter in facts.parameters
        if cut.owners[parameter.name] & rank_stages
    )
    tensor_plan = facts.tensor_plan
    if tensor_plan is not None:
        tensor_plan = _plan_of_rank(tensor_plan, cut, rank_stages, blocks)
    experts = facts.experts
    if experts is not None:
        names = {parameter.name for parameter in parameters}
        expert_parameters = tuple(name for name in experts.parameters if name in names)
        experts = replace(experts, parameters=expert_parameters)
    return replace(
        facts,
        parameters=parameters,
        blocks=blocks,
        tensor_plan=tensor_plan,
        experts=experts,
        # In a pipeline everything outside of the blocks is one unit (`parallel.data.shard_units`).
        outer=OuterUnits(),
    )


def _blocks_of_stage(cut: StageCut, stage: int) -> tuple[str, ...]:
    return cut.blocks[cut.bounds[stage] : cut.bounds[stage + 1]]


def _plan_of_rank(
    plan: TensorPlan, cut: StageCut, rank_stages: set[int], blocks: tuple[str, ...]
) -> TensorPlan:
    """Return the plan of the modules that run on these stages.

    A tied weight has two modules: one runs on the first stage, the other on the last.
    """

    def runs(module: str) -> bool:
        if any(module.startswith(f"{block}.") for block in cut.blocks):
            return any(module.startswith(f"{block}.") for block in blocks)
        parameters = [name for name in cut.owners if name.startswith(f"{module}.")]
        in_front = any(name in cut.first_stage for name in parameters)
        module_stages = {0 if in_front else cut.stages - 1}
        for name in parameters:
            module_stages |= set(cut.recomputed.get(name, ()))
        return bool(module_stages & rank_stages)

    modules = tuple(entry for entry in plan.modules if runs(entry.name))
    norms = tuple(filter(runs, plan.norms))
    whole = tuple(filter(runs, plan.whole))
    return replace(plan, modules=modules, norms=norms, whole=whole)


def stage_counts(
    schedule: Schedule,
    rank: int,
    *,
    cut: StageCut,
    facts: ModelFacts,
    boundary_bytes: int,
    ledger: Ledger,
) -> StageCounts:
    """Return the counts of a rank.

    Args:
        schedule: Schedule of the pipeline.
        rank: Rank on the pp axis.
        cut: Cut of the model.
        facts: Facts of the complete model.
        boundary_bytes: Bytes of the activations that a stage sends for a micro-batch.
        ledger: Ledger of one candidate layout, whose arrays decide the shapes of the counts.
    """
    one_per_candidate = np.ones_like(ledger.dp_shard)
    sends = sum(len(sent) for (source, _), sent in messages(schedule).items() if source == rank)
    ends = cut.outside_stages() & set(schedule.stages_of(rank))
    return StageCounts(
        root_gathers=one_per_candidate * _root_gathers(schedule.ranks[rank]),
        ends=one_per_candidate * len(ends),
        root_reduces=one_per_candidate * (len(ends) * schedule.microbatches),
        sends=one_per_candidate * sends,
        boundary_bytes=one_per_candidate * boundary_bytes,
        shared_bytes=one_per_candidate * _shared_bytes(schedule, rank, cut, facts, ledger),
    )


def _root_gathers(row: Iterable[Action]) -> int:
    """Return how often ZeRO stage 3 gathers the root unit."""
    # Every computation needs the root, and every backward frees it.
    count = 0
    gathered = False
    for action in row:
        if not gathered:
            count += 1
        gathered = action.kind is Kind.FORWARD
    return count


def _shared_bytes(
    schedule: Schedule, rank: int, cut: StageCut, facts: ModelFacts, ledger: Ledger
) -> int:
    """Return the bytes that a rank sends to sum the gradients of tied parameters.

    An all-reduce over n ranks sends 2 (n - 1) / n of this rank's part of a gradient.
    """
    total = 0
    for parameter in facts.trainable:
        ranks = {schedule.stage_ranks[stage] for stage in cut.owners[parameter.name]}
        if len(ranks) > 1 and rank in ranks:
            dim = facts.tensor_plan.dims[parameter.name] if facts.tensor_plan is not None else None
            total += 2 * (len(ranks) - 1) * _local_bytes(parameter, dim, ledger) // len(ranks)
    return total


def _local_bytes(parameter: ParameterFacts, dim: int | None, ledger: Ledger) -> int:
    """Return the bytes of a rank's part of a parameter.

    tp splits it along `dim`, and dp_shard along the first dimension.
    """
    part = parameter_part(parameter.shape, dim, ledger)
    return int(part.held[0] * part.row[0]) * parameter.itemsize


def unsharded_after(
    schedule: Schedule,
    rank: int,
    *,
    zero: int,
    facts: ModelFacts,
    cut: StageCut,
    gathered: dict[str, int],
    gradients: dict[str, int],
) -> list[UnshardedBytes]:
    """Return the unsharded bytes after every computation of a rank, in the order of its row.

    Everything is zero if parameters are neither sharded nor cast.

    Args:
        schedule: Schedule of the pipeline.
        rank: Rank on the pp axis.
        zero: ZeRO stage.
        facts: Facts of the complete model.
        cut: Cut of the model.
        gathered: Bytes of every parameter when it is gathered, with padding.
        gradients: Bytes of the unsharded gradient of every parameter.
    """
    stages = set(schedule.stages_of(rank))
    blocks, root = _parameters_of_rank(facts, cut, stages)
    ends = cut.outside_stages() & stages
    remaining = dict.fromkeys(stages, schedule.microbatches)
    is_gathered: set[str] = set()
    has_gradient: set[str] = set()
    rows = []
    for action in schedule.ranks[rank]:
        stage = action.stage
        is_gathered |= {*blocks[stage], *root}
        if zero == 3:
            is_gathered -= set(blocks[stage])
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            has_gradient.update(blocks[stage])
            has_gradient.update(name for name, users in root.items() if stage in users)
            for names, after in (
                (blocks[stage], after_block_backward(zero, remaining, ran=stage, own=stage)),
                (root, after_root_backward(zero, remaining, ran=stage, users=ends)),
            ):
                if after.reduce:
                    has_gradient -= set(names)
                if after.free:
                    is_gathered -= set(names)
            remaining[stage] -= 1
        gathered_bytes = sum(gathered[name] for name in is_gathered)
        gradient_bytes = sum(gradients.get(name, 0) for name in has_gradient)
        rows.append(UnshardedBytes(action, gathered_bytes, gradient_bytes))
    return rows


def _parameters_of_rank(
    facts: ModelFacts, cut: StageCut, stages: set[int]
) -> tuple[dict[int, list[str]], dict[str, set[int]]]:
    """Return the parameters of each stage's blocks, and the stages that use each other one."""
    stage_of_block: dict[str, int] = {}
    for stage in stages:
        stage_of_block.update(dict.fromkeys(_blocks_of_stage(cut, stage), stage))
    blocks: dict[int, list[str]] = {stage: [] for stage in stages}
    root: dict[str, set[int]] = {}
    for parameter in facts.parameters:
        users = set(cut.owners[parameter.name] & stages)
        if parameter.unit >= 0:
            block = facts.blocks[parameter.unit]
            if block in stage_of_block:
                blocks[stage_of_block[block]].append(parameter.name)
        elif users:
            root[parameter.name] = users
    return blocks, root


@dataclass(frozen=True)
class StageRow:
    """Summary of one stage of a cut.

    Attributes:
        stage: Number of the stage.
        rank: Rank on the pp axis.
        blocks: Names of its blocks.
        parameters: Number of parameters; tied parameters count on each stage that holds them.
        cost: FLOPs of a forward for one token (see `balance.forward_costs`).
    """

    stage: int
    rank: int
    blocks: tuple[str, ...]
    parameters: int
    cost: float


def stage_rows(schedule: Schedule, cut: StageCut, facts: ModelFacts) -> list[StageRow]:
    """Return a summary of every stage. `facts` describe the complete model."""
    costs = forward_costs(facts)
    sizes = [end - start for start, end in pairwise(cut.bounds)]
    loads = stage_costs(costs.blocks, sizes, first=costs.first, last=costs.last)
    rows = []
    for stage in range(cut.stages):
        row = StageRow(
            stage=stage,
            rank=schedule.stage_ranks[stage],
            blocks=_blocks_of_stage(cut, stage),
            parameters=facts_of_rank(facts, cut, [stage]).numel,
            cost=loads[stage],
        )
        rows.append(row)
    return rows


def rank_imbalance(rows: Sequence[StageRow]) -> float:
    """Return the largest cost of a rank divided by the mean; 1.0 is even."""
    loads: dict[int, float] = {}
    for row in rows:
        loads[row.rank] = loads.get(row.rank, 0.0) + row.cost
    return imbalance(list(loads.values()))
