"""Cut of a model into pipeline stages that makes the slowest stage as fast as possible.

The functions work on numbers only: costs of blocks in, numbers of blocks out. The embedding is on
the first stage and the head on the last, and both are counted. Stages are contiguous in the model's
order. The result is exact: no other cut has a smaller largest stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm

from plait.errors import InputError, ModelError
from plait.model.facts import ModelFacts, block_index


@dataclass(frozen=True)
class ForwardCosts:
    """Costs of the parts of a model, in one unit.

    Attributes:
        blocks: Cost of every block, in the model's order.
        first: Cost of the modules before the blocks, on the first stage.
        last: Cost of the modules after the blocks, on the last stage.
    """

    blocks: tuple[float, ...]
    first: float
    last: float


def forward_costs(facts: ModelFacts) -> ForwardCosts:
    """Return the FLOPs of a forward for one token, from the shapes of the parameters.

    A weight that is multiplied costs 2 FLOPs (Kaplan et al. 2020, arXiv:2001.08361, table 1,
    without attention's products of activations). Weights are the parameters of at least 2
    dimensions; biases and norms cost nothing.

    Parameters outside the blocks are on the first stage if they are listed before those of the
    first block, else on the last. On the first stage a matrix is taken for an embedding, whose
    lookup costs 0. A tied embedding (its other name is outside the blocks too) is multiplied as the
    head: 2 FLOPs per weight on the last stage. A weight that several blocks share counts in each.
    Experts count as if all were used, which is right for the balance of equal blocks, but too much
    compared to the head.

    Raises:
        ModelError: The model has no blocks.
    """
    if not facts.blocks:
        raise ModelError(
            "the model has no repeated blocks to cut into pipeline stages; name them in"
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


def cut(
    costs: Sequence[float], stages: int, *, first: float = 0, last: float = 0
) -> tuple[int, ...]:
    """Return the number of blocks of each stage that minimises the cost of the largest stage.

    Several cuts may be best. Of these, each stage in turn takes as many blocks as fit into an equal
    share of what remains, and more only if the remainder would not fit otherwise. So what cannot be
    shared evenly is on the later stages (10 equal blocks on 4 stages: 2, 2, 3, 3), and the earlier
    stages, which hold the activations of more micro-batches, have less.

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
    """Return the costs of the blocks in a unit in which all are integers.

    Sums and comparisons of integers are exact. The first block is always on the first stage, so
    `first` is added to it, and `last` to the last block.
    """
    exact = [Fraction(cost) for cost in costs]
    exact[0] += Fraction(first)
    exact[-1] += Fraction(last)
    unit = lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _least_limit(items: Sequence[int], stages: int) -> int:
    """Return the smallest cost that no stage needs to exceed, by bisection."""
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
    """Return, for each i, the number of stages that the blocks from i on need within `limit`."""
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
    """Return the cost of each stage of a cut.

    Args:
        costs: Cost of each block.
        sizes: Number of blocks of each stage.
        first: Cost of the modules before the blocks.
        last: Cost of the modules after the blocks.

    Raises:
        InputError: `sizes` do not add up to the number of blocks.
    """
    if sum(sizes) != len(costs) or not sizes or min(sizes) < 1:
        raise InputError(
            f"stages of {', '.join(map(str, sizes))} blocks: their sum must be the {len(costs)}"
            " blocks of the model, and each at least 1"
        )
    ends = list(accumulate(sizes))
    loads = [float(sum(costs[end - size : end])) for size, end in zip(sizes, ends, strict=True)]
    loads[0] += first
    loads[-1] += last
    return tuple(loads)


def imbalance(loads: Sequence[float]) -> float:
    """Return the largest cost divided by the mean.

    1.0 is even. With 1.2 a pipeline of many micro-batches takes 1.2 times as long as it could.
    """
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0
