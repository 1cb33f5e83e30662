"""Where to cut a model into pipeline stages, so that the slowest stage is as fast as it can be.

Numbers only: costs of blocks go in, numbers of blocks come out. The embedding is on the first stage
and the head on the last, and both are counted; the stages are neighbours in the model's order. The
result is exact: no other cut has a smaller largest stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm

from plait.errors import InputError, ModelError
from plait.model.facts import ModelFacts


@dataclass(frozen=True)
class Costs:
    """What each part of a model costs, in one unit."""

    blocks: tuple[float, ...]
    """Of every block, in the model's order."""
    first: float
    """Of what comes before the blocks, on the first stage."""
    last: float
    """Of what comes after them, on the last stage."""


def forward_costs(facts: ModelFacts) -> Costs:
    """FLOPs of a forward for one token, from the shapes of the parameters: 2 a weight that is
    multiplied (Kaplan et al. 2020, arXiv:2001.08361, table 1, without attention's products of
    activations).

    Weights are the parameters of at least 2 dimensions; biases and norms cost nothing. Of the
    parameters outside the blocks, those listed before the first block's are on the first stage, all
    others on the last. On the first stage a matrix is taken for an embedding: a lookup, 0. A tied
    one (its other name is outside the blocks too) is multiplied as the head: 2 a weight on the last
    stage. A weight that several blocks share counts in each. Experts count as if all were used:
    right for the balance of equal blocks, too much compared to the head.

    Raises ModelError for a model without blocks.
    """
    if not facts.blocks:
        raise ModelError(
            "the model has no repeated blocks to cut into pipeline stages; name them in"
            " parallel.blocks"
        )
    blocks = [0.0] * len(facts.blocks)
    ends = [0.0, 0.0]
    begun = False
    for parameter in facts.parameters:
        begun = begun or parameter.unit >= 0
        if len(parameter.shape) < 2:
            continue
        flops = 2.0 * parameter.numel
        units = [_unit(name, facts.blocks) for name in (parameter.name, *parameter.also)]
        for unit in {unit for unit in units if unit >= 0}:
            blocks[unit] += flops
        outside = units.count(-1)
        if outside > 1 or (outside and begun):
            ends[1] += flops
        # a convolution; a matrix before the blocks is a lookup
        elif outside and len(parameter.shape) > 2:
            ends[0] += flops
    return Costs(tuple(blocks), *ends)


def _unit(name: str, blocks: Sequence[str]) -> int:
    return next((index for index, block in enumerate(blocks) if name.startswith(f"{block}.")), -1)


def cut(
    costs: Sequence[float], stages: int, *, first: float = 0, last: float = 0
) -> tuple[int, ...]:
    """The number of blocks of each stage, at least 1 each, such that the most expensive stage is as
    cheap as possible.

    `first` is added to the first stage's cost and `last` to the last one's. Of several best cuts:
    from the first stage on, each takes as many blocks as fit into an equal share of what is left,
    and more only where what is left would not fit otherwise. So what cannot be shared out evenly is
    on the later stages (10 equal blocks on 4 stages: 2, 2, 3, 3), and the earlier ones, which hold
    the activations of more micro-batches, have less.

    Raises InputError for more stages than blocks, and for costs that are negative or not finite.
    """
    if not 1 <= stages <= len(costs):
        raise InputError(
            f"{stages} pipeline stages and {len(costs)} blocks: every stage needs a block; use 1 to"
            f" {len(costs)} stages"
        )
    if not all(0 <= cost < float("inf") for cost in (*costs, first, last)):
        raise InputError(
            f"costs from {min(*costs, first, last)} to {max(*costs, first, last)}: a cost is finite"
            " and not below 0"
        )
    items = _whole(_with_ends(costs, first, last))
    before = [0, *accumulate(items)]
    limit = _least_limit(items, stages)
    needed = _stages_needed(items, limit)
    sizes: list[int] = []
    start = 0
    for left in range(stages, 1, -1):
        # An equal share among this stage and the next ones, when those behind keep one block each:
        # the last block may be worth several shares.
        share = min(
            (before[len(items) - (left - among)] - before[start]) // among
            for among in range(1, left + 1)
        )
        size = 1
        # One more block while that keeps the share, or while the rest would need more stages than
        # there are; the rest keeps a block a stage.
        while start + size < len(items) - (left - 1) and (
            needed[start + size] > left - 1 or before[start + size + 1] - before[start] <= share
        ):
            size += 1
        sizes.append(size)
        start += size
    return (*sizes, len(items) - start)


def _with_ends(costs: Sequence[float], first: float, last: float) -> list[Fraction]:
    """The first block is always on the first stage, so what comes before belongs to it; likewise at
    the end.
    """
    exact = [Fraction(cost) for cost in costs]
    exact[0] += Fraction(first)
    exact[-1] += Fraction(last)
    return exact


def _whole(costs: Sequence[Fraction]) -> list[int]:
    """The same in a unit in which all are integers, so that sums and comparisons are exact."""
    unit = lcm(*(cost.denominator for cost in costs))
    return [int(cost * unit) for cost in costs]


def _least_limit(items: Sequence[int], stages: int) -> int:
    """The smallest cost that no stage needs to exceed, by bisection: at most one step a bit of the
    total.
    """
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
    """Entry i: the fewest stages that hold the blocks from i on, none above `limit`. Filling each
    stage up from the end is best.
    """
    needed = [0] * (len(items) + 1)
    count = 0
    load = limit + 1
    for index in range(len(items) - 1, -1, -1):
        load += items[index]
        if load > limit:
            count = count + 1
            load = items[index]
        needed[index] = count
    return needed


def stage_costs(
    costs: Sequence[float], sizes: Sequence[int], *, first: float = 0, last: float = 0
) -> tuple[float, ...]:
    """The cost of each stage of a cut, with the two ends. Raises InputError where `sizes` do not
    add up to the blocks.
    """
    if sum(sizes) != len(costs) or not sizes or min(sizes) < 1:
        raise InputError(
            f"stages of {', '.join(map(str, sizes))} blocks: {len(costs)} blocks are to be shared"
            " out, at least 1 each"
        )
    ends = list(accumulate(sizes))
    loads = [float(sum(costs[end - size : end])) for size, end in zip(sizes, ends, strict=True)]
    loads[0] += first
    loads[-1] += last
    return tuple(loads)


def imbalance(loads: Sequence[float]) -> float:
    """The largest cost over the mean: 1.0 is even, and with 1.2 a pipeline of many micro-batches
    takes 1.2 times as long as it could.
    """
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0
