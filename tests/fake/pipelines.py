"""One rank of a fake world's pipeline, what it holds and sends by its ledger."""

from __future__ import annotations

from typing import Any

import torch

import plait
from plait.config.resolving.resolve import Resolved, load, resolve
from plait.engine.engine import Engine
from plait.engine.single_rank import predict_messages
from plait.model.blocks import find_blocks
from plait.model.facts import ModelFacts, model_facts
from plait.model.plans import make_plan
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from plait.parallel.pipeline.estimates import facts_of_rank, stage_counts
from plait.parallel.techniques.pipeline_parallel import PipelinePlan
from tests.parity import cases
from tests.parity.pipelines import layers_of

HIDDEN, LENGTH = 32, 8


def build(
    config: dict[str, Any], world: int, *, layers: int | None = None, length: int = LENGTH
) -> tuple[Engine, Resolved, ModelFacts, PipelinePlan]:
    """An engine of one rank of the fake world, in float32; embeddings are tied."""
    model = cases.build("llama", tied=True, dtype=torch.float32, layers=layers or layers_of(config))
    resolved = resolve(load(config), world_size=world)
    blocks, tp = find_blocks(model), resolved.layout.tp
    facts = model_facts(
        model, blocks, tensor_plan=make_plan(model, tp=tp, blocks=blocks) if tp > 1 else None
    )
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    found = engine.parts.plans.pipeline
    assert found is not None and engine.sharded.pipeline is not None
    predict_messages(engine.model, engine.parts, engine.sharded.pipeline, batch(1, length=length))
    return engine, resolved, facts, found


def batch(accumulation: int, *, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """One rank's step."""
    ids = torch.arange(2 * accumulation * length).view(-1, length) % cases.VOCABULARY
    return {"input_ids": ids, "labels": ids}


def predicted(resolved: Resolved, facts: ModelFacts, pipeline: PipelinePlan, rank: int) -> Ledger:
    """What the techniques' `account` says of a rank."""
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
    own = facts_of_rank(facts, pipeline.cut, pipeline.schedule.stages_of(at["pp"]))
    techniques = resolved.techniques
    return account_all(techniques, ledger.with_(stage=counts), own)
