"""Estimates of a pipeline without running it: balanced stages, and the bytes of each rank.

`balance_stages` takes the cost of each block and returns the number of blocks per stage such that
the slowest stage is as fast as possible. The embedding is on the first stage and the head on the
last, and both are counted. Stages are contiguous in the model's order. The result is exact: no
other partition has a smaller largest stage.

A rank's parameters are those of its stages. The techniques account for them as they do without a
pipeline. Two things differ and are derived from the schedule's table: how often the root unit (the
parameters outside the blocks) is gathered and reduced, and the messages to other stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm

import numpy as np

from plait.errors import InputError, ModelError
from plait.model.blocks import block_index
from plait.model.facts import ModelFacts
from plait.model.outer_layers import OuterUnits
from plait.model.plans import TensorPlan
from plait.model.sequence import is_inside
from plait.model.stages import StageCut
from plait.parallel.accounting.ledger import (
    Ledger,
    StageCounts,
    parameter_part,
)
from plait.parallel.schedules.schedule import Action, Kind, Schedule, messages


def forward_costs(facts: ModelFacts) -> ForwardCosts:
    """Return the FLOPs of a forward for one token, from the shapes of the parameters.

    A weight that is multiplied costs 2 FLOPs (Kaplan et al. 2020, arXiv:2001.08361, table 1). The
    products of activations in attention are left out. Weights are the parameters of at least 2
    dimensions; biases and norms cost nothing.

    Parameters outside the blocks are on the first stage if they are listed before those of the
    first block, else on the last. On the first stage a matrix is assumed to be an embedding,
    whose lookup costs 0. A tied embedding (whose other name is also outside the blocks) counts as
    the head: 2 FLOPs per weight on the last stage. A weight that several blocks share counts in
    each. Experts count as if all were used. This does not affect the balance of equal blocks, but
    overestimates their cost relative to the head.

    Raises:
        ModelError: The model has no blocks.
    """
    if not facts.blocks:
        raise ModelError(
            "the model has no repeated blocks to split into pipeline stages; name them in"
            " parallel.blocks"
        )
    blocks = [0.0] * len(facts.blocks)
    first = 0.0
    last = 0.0
    begun = False
    for parameter in facts.parameters:
        begun = begun or parameter.unit >= 0
        if len(parameter.shape) < 2:
            continue
        flops = 2.0 * parameter.numel
        units = [block_index(name, facts.blocks) for name in (parameter.name, *parameter.also)]
        for unit in {unit for unit in units if unit >= 0}:
            blocks[unit] += flops
        outside = units.count(-1)
        if outside > 1 or (outside and begun):
            last += flops
        elif outside and len(parameter.shape) > 2:
            # This is a convolution. A matrix before the blocks is an embedding.
            first += flops
    return ForwardCosts(tuple(blocks), first, last)


@dataclass(frozen=True)
class ForwardCosts:
    """Costs of a model's blocks, and of the modules before and after them, in one common unit.

    Attributes:
        blocks: Cost of every block, in the model's order.
        first: Cost of the modules before the blocks, on the first stage.
        last: Cost of the modules after the blocks, on the last stage.
    """

    blocks: tuple[float, ...]
    first: float
    last: float


def balance_stages(
    costs: Sequence[float], stages: int, *, first: float = 0, last: float = 0
) -> tuple[int, ...]:
    """Return the number of blocks of each stage, so that the largest cost of a stage is minimal.

    If several partitions are best, stages are filled one after the other. Each takes as many blocks
    as fit into an equal share of the remaining cost, and more only if the remaining blocks would
    not fit otherwise. If blocks cannot be shared evenly, later stages therefore get more of them
    (10 equal blocks on 4 stages: 2, 2, 3, 3), because earlier stages hold the activations of more
    micro-batches.

    Args:
        costs: Cost of each block.
        stages: Number of stages. Every stage gets at least one block.
        first: Cost of the modules before the blocks, added to the first stage.
        last: Cost of the modules after the blocks, added to the last stage.

    Raises:
        InputError: There are more stages than blocks, or a cost is negative or not finite.
    """
    if not 1 <= stages <= len(costs):
        raise InputError(
            f"{stages} pipeline stages and {len(costs)} blocks: every stage needs a block; use 1 to"
            f" {len(costs)} stages"
        )
    if not all(0 <= cost < float("inf") for cost in (*costs, first, last)):
        raise InputError(
            f"costs from {min(*costs, first, last)} to {max(*costs, first, last)}: every cost must"
            " be finite and at least 0"
        )
    items = _integer_costs(costs, first, last)
    cumulative = [0, *accumulate(items)]
    limit = _least_limit(items, stages)
    needed = _stages_needed(items, limit)
    sizes: list[int] = []
    start = 0
    for remaining in range(stages, 1, -1):
        # An equal share among this stage and the next ones, if those behind them take one block
        # each: the last block may be worth several shares.
        share = min(
            (cumulative[len(items) - (remaining - count)] - cumulative[start]) // count
            for count in range(1, remaining + 1)
        )
        # Add a block as long as the stage stays within the share, or the remainder would need more
        # stages than there are. The remainder keeps a block per stage.
        size = 1
        while start + size < len(items) - (remaining - 1):
            remainder_fits = needed[start + size] <= remaining - 1
            exceeds_share = cumulative[start + size + 1] - cumulative[start] > share
            if remainder_fits and exceeds_share:
                break
            size += 1
        sizes.append(size)
        start += size
    return (*sizes, len(items) - start)


def _integer_costs(costs: Sequence[float], first: float, last: float) -> list[int]:
    """Return the costs of the blocks, scaled to integers.

    Sums and comparisons of integers are exact. The first block is always on the first stage, so
    `first` is added to it, and `last` to the last block.
    """
    exact = [Fraction(cost) for cost in costs]
    exact[0] += Fraction(first)
    exact[-1] += Fraction(last)
    unit = lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _least_limit(items: Sequence[int], stages: int) -> int:
    """Find, by bisection, the smallest limit of a stage's cost that some partition respects."""
    low = max(items)
    high = sum(items)
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(items, middle)[0] <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_needed(items: Sequence[int], limit: int) -> list[int]:
    """Return, for each i, how many stages block i and all later blocks need.

    No stage may cost more than `limit`.
    """
    needed = [0] * (len(items) + 1)
    count = 0
    load = limit + 1
    # Filling each stage from the end is optimal.
    for index in range(len(items) - 1, -1, -1):
        load += items[index]
        if load > limit:
            count += 1
            load = items[index]
        needed[index] = count
    return needed


def stage_costs(
    costs: Sequence[float], sizes: Sequence[int], *, first: float = 0, last: float = 0
) -> tuple[float, ...]:
    """Return the cost of each stage.

    Args:
        costs: Cost of each block.
        sizes: Number of blocks of each stage. Their sum is the number of blocks.
        first: Cost of the modules before the blocks.
        last: Cost of the modules after the blocks.
    """
    ends = list(accumulate(sizes))
    loads = [float(sum(costs[end - size : end])) for size, end in zip(sizes, ends, strict=True)]
    loads[0] += first
    loads[-1] += last
    return tuple(loads)


def imbalance(loads: Sequence[float]) -> float:
    """Return the largest cost divided by the mean.

    1.0 is balanced. With 1.2 a pipeline of many micro-batches takes 1.2 times as long as it could.
    """
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0


def facts_of_rank(facts: ModelFacts, cut: StageCut, stages: Sequence[int]) -> ModelFacts:
    """Return the facts of the part of a model that a rank with these stages holds.

    Parameters that are tied across stages belong to each of these stages.
    """
    rank_stages = set(stages)
    blocks = tuple(name for stage in stages for name in _blocks_of_stage(cut, stage))
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
        # In a pipeline everything outside the blocks is one unit (`techniques.shard_units`).
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
        if is_inside(module, cut.blocks):
            return is_inside(module, blocks)
        parameters = [name for name in cut.owners if name.startswith(f"{module}.")]
        in_front = any(name in cut.first_stage for name in parameters)
        module_stages = {0 if in_front else cut.stages - 1}
        for name in parameters:
            module_stages |= set(cut.recomputed.get(name, ()))
        return bool(module_stages & rank_stages)

    modules = tuple(entry for entry in plan.modules if runs(entry.name))
    return replace(
        plan,
        modules=modules,
        norms=tuple(filter(runs, plan.norms)),
        all_token_modules=tuple(filter(runs, plan.all_token_modules)),
        adapters=tuple(filter(runs, plan.adapters)),
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
    """Return how often a rank gathers, reduces and sends in a step.

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
            dim = None
            if facts.tensor_plan is not None:
                dim = facts.tensor_plan.dims[parameter.name]
            # tp splits it along `dim`, and dp_shard along the first dimension.
            part = parameter_part(parameter.shape, dim, ledger)
            local_bytes = int(part.local[0] * part.row[0]) * parameter.itemsize
            total += 2 * (len(ranks) - 1) * local_bytes // len(ranks)
    return total


@dataclass(frozen=True)
class StageRow:
    """Summary of one pipeline stage: its rank, blocks, parameters and cost.

    Attributes:
        stage: Number of the stage.
        rank: Rank on the pp axis.
        blocks: Names of its blocks.
        parameters: Number of parameters; tied parameters count on each stage that holds them.
        cost: FLOPs of a forward for one token (see `forward_costs`).
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
    return [
        StageRow(
            stage=stage,
            rank=schedule.stage_ranks[stage],
            blocks=_blocks_of_stage(cut, stage),
            parameters=facts_of_rank(facts, cut, [stage]).numel,
            cost=loads[stage],
        )
        for stage in range(cut.stages)
    ]


def rank_imbalance(rows: Sequence[StageRow]) -> float:
    """Return the largest cost of a rank divided by the mean; 1.0 is balanced."""
    loads: dict[int, float] = {}
    for row in rows:
        loads[row.rank] = loads.get(row.rank, 0.0) + row.cost
    return imbalance(list(loads.values()))
