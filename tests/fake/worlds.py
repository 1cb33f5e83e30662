"""One rank of a fake world, what it holds and sends by its ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import plait
from plait.config.resolving.resolve import Resolved, load, resolve
from plait.engine.engine import Engine
from plait.model.blocks import find_blocks
from plait.model.facts import ModelFacts, model_facts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from tests.parity import cases

FakeWorld = Callable[..., None]


def build(kind: str, config: dict[str, Any], world: int) -> tuple[Engine, Resolved, ModelFacts]:
    """An engine of one rank of the fake world, in float32."""
    model = cases.build(kind, tied=kind == "llama", dtype=torch.float32)
    facts = model_facts(model, find_blocks(model))
    resolved = resolve(load(config), world_size=world)
    return plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss), resolved, facts


def batch(accumulation: int, *, samples: int = 2, length: int = 8) -> dict[str, torch.Tensor]:
    """One rank's step."""
    ids = torch.arange(samples * accumulation * length).view(-1, length) % cases.VOCABULARY
    return {"input_ids": ids, "labels": ids}


def predicted(resolved: Resolved, facts: ModelFacts, rank: int) -> Ledger:
    """What the techniques' `account` says."""
    layout = resolved.layout
    start = Ledger.start(
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        accumulation=resolved.batch.accumulation,
        shard_rank=rank % layout.dp_shard,
    )
    return account_all(resolved.techniques, start, facts)
