"""A pipeline rank of a fake world, and its ledger."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import plait
from plait.config.resolving.resolve import load, resolve
from plait.engine.single_rank import predict_messages
from plait.parallel.accounting.ledger import Ledger, after_block_backward, after_root_backward
from plait.parallel.order import account_all
from plait.parallel.pipeline.estimates import facts_of_rank, stage_counts
from plait.parallel.schedules.schedule import Action, Kind
from tests.fake.worlds import batch, facts_of
from tests.parity import cases
from tests.parity.pipelines import layers_of

HIDDEN = 32
LENGTH = 8


def build(config, world, *, layers=None, length=LENGTH):
    """Build an engine of one rank of the fake world, in float32 with tied embeddings."""
    model = cases.build("llama", tied=True, dtype=torch.float32, layers=layers or layers_of(config))
    resolved = resolve(load(config), world_size=world)
    facts = facts_of(model, resolved)
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    plan = engine.parts.plans.pipeline
    assert plan is not None and engine.sharded.pipeline is not None
    predict_messages(engine.model, engine.parts, engine.sharded.pipeline, batch(1, length=length))
    return engine, resolved, facts, plan


def predicted(resolved, facts, pipeline, rank):
    """Return the ledger of a rank from the `account` methods of the techniques."""
    layout = resolved.layout
    at = layout.coordinates(rank)
    ledger = Ledger.of_rank(layout, at, accumulation=resolved.batch.accumulation, tokens=2 * LENGTH)
    itemsize = 2 if resolved.precision.compute else 4
    part = layout.tp if resolved.tensor_parallel.sequence_parallel else 1
    counts = stage_counts(
        pipeline.schedule,
        at["pp"],
        cut=pipeline.cut,
        facts=facts,
        boundary_bytes=2 * LENGTH * HIDDEN * itemsize // part,
        ledger=ledger,
    )
    rank_facts = facts_of_rank(facts, pipeline.cut, pipeline.schedule.stages_of(at["pp"]))
    return account_all(resolved.techniques, ledger.with_(stage=counts), rank_facts)


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


def unsharded_after(schedule, rank, *, zero, facts, cut, gathered, gradients):
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
            after_block = after_block_backward(zero, remaining, ran=stage, block_stage=stage)
            after_root = after_root_backward(zero, remaining, ran=stage, users=ends)
            for names, after in ((blocks[stage], after_block), (root, after_root)):
                if after.reduce:
                    has_gradient -= set(names)
                if after.free:
                    is_gathered -= set(names)
            remaining[stage] -= 1
        gathered_bytes = sum(gathered[name] for name in is_gathered)
        gradient_bytes = sum(gradients.get(name, 0) for name in has_gradient)
        rows.append(UnshardedBytes(action, gathered_bytes, gradient_bytes))
    return rows


def _parameters_of_rank(facts, cut, stages):
    """Return the parameters of each stage's blocks, and the stages that use each other one."""
    stage_of_block: dict[str, int] = {}
    for stage in stages:
        stage_of_block.update(
            dict.fromkeys(cut.blocks[cut.bounds[stage] : cut.bounds[stage + 1]], stage)
        )
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
