"""A worker of the simulated pool: it builds one side of a layout, and counts one step."""

from typing import Any

import torch

from benchmarks.step_counts import peers
from benchmarks.step_counts.counting import StepCounts, count_step
from benchmarks.step_counts.layouts import Layout
from benchmarks.step_counts.peers import Sharding, Step, units_of
from benchmarks.steps.workload import batch, build_model

WARM = 4
"""Steps before the counted one: allocations, lazy states and schedules are settled by then."""


def plait_step(rank: int, world: int, layout: Layout) -> tuple[StepCounts, Sharding]:
    """Count a step of Plait, and return how it was sharded."""
    import plait

    engine = plait.initialize(
        build_model(layout.workload), layout.configuration(), loss_fn=plait.causal_lm_loss
    )
    shard = engine.sharded.parts.shard
    sharding = Sharding(units_of(engine.model), shard.compute_dtype, shard.reduce_dtype)
    counts = _counted(engine.train_batch, layout, rank)
    engine.close()
    return counts, sharding


def peer_step(rank: int, world: int, layout: Layout, sharding: Sharding) -> StepCounts:
    step: Step = getattr(peers, layout.peer)(layout, sharding, torch.device("cuda", rank))
    return _counted(step, layout, rank)


def _counted(step: Any, layout: Layout, rank: int) -> StepCounts:
    batches = [batch(layout.workload, step=number, rank=rank) for number in range(WARM + 1)]
    for warm in batches[:WARM]:
        step(warm)
    return count_step(lambda: step(batches[WARM]))
