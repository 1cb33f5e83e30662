"""Bytes of context parallelism: what a rank of a fake world sends and keeps is the ledger's, and what it keeps falls as 1 / cp."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from plait.cluster.mesh import build_mesh
from plait.config.resolving.resolve import load, resolve
from plait.dryrun.dry_model import ActivationTechniques, rank_activations, token_batch
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.model.plans import make_plan
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from plait.parallel.parts import Parts
from tests.fake.worlds import FakeWorld
from tests.measured.memory import measure_step
from tests.measured.traffic import count_traffic
from tests.parity import cases

SAMPLES, LENGTH = 2, 32
CASES: list[tuple[str, str, dict[str, Any], int, dict[str, Any]]] = [
    ("all-gather-kv", "llama", {"cp": 4, "dp_shard": 2}, 3, {}),
    ("all-gather-kv", "gpt2", {"cp": 2, "tp": 2}, 0, {"recompute": {"mode": "full"}}),
    (
        "all-gather-kv",
        "llama",
        {"cp": 2, "dp_replicate": 2},
        0,
        {"recompute": {"mode": "selective"}},
    ),
    ("ring", "llama", {"cp": 4, "tp": 2}, 0, {"recompute": {"mode": "full"}}),
    ("ring", "qwen3", {"cp": 2, "dp_shard": 2}, 1, {}),
    ("ring", "gpt2", {"cp": 2}, 0, {"recompute": {"mode": "selective"}}),
    ("ulysses", "llama", {"cp": 4}, 0, {"recompute": {"mode": "full"}}),
    ("ulysses", "qwen3", {"cp": 2, "dp_shard": 2}, 2, {}),
    (
        "ulysses",
        "llama",
        {"cp": 2, "tp": 2},
        0,
        {"sequence_parallel": True, "recompute": {"mode": "selective"}},
    ),
]


@pytest.mark.parametrize(("kind", "family", "degrees", "stage", "more"), CASES)
def test_sends_and_keeps_its_account(
    fake_world: FakeWorld,
    kind: str,
    family: str,
    degrees: dict[str, int],
    stage: int,
    more: dict[str, Any],
) -> None:
    """Every collective, the states, and what a micro-batch keeps, on the last rank too."""
    world = 1
    for degree in degrees.values():
        world *= degree
    fake_world(world, world - 1)
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "parallel": {**degrees, **more, "context": kind},
    }
    resolved = resolve(load(config), world_size=world)
    model = cases.build(family, tied=False, dtype=torch.float32)
    blocks, at = find_blocks(model), resolved.layout
    (measured,) = rank_activations(
        Parts(model, blocks),
        mesh=build_mesh(at),
        batch=token_batch(SAMPLES, LENGTH),
        techniques=ActivationTechniques.of(resolved),
    )
    facts = model_facts(
        model, blocks, tensor_plan=make_plan(model, tp=at.tp, blocks=blocks) if at.tp > 1 else None
    )
    start = Ledger.of_rank(
        at, at.coordinates(world - 1), accumulation=1, tokens=SAMPLES * LENGTH, activations=measured
    )
    ledger = account_all(resolved.techniques, start, facts)
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    ids = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH) % cases.VOCABULARY
    batch = {"input_ids": ids, "labels": ids}
    held = measure_step(engine, batch)
    with count_traffic() as traffic:
        engine.train_batch(batch)
    assert {name: held[name] for name in ("parameters", "gradients", "optimizer")} == {
        name: int(ledger.memory[name][0]) for name in ("parameters", "gradients", "optimizer")
    }
    sent = {name: count for name, count in traffic.bytes().items() if name != "control"}
    assert sent == {name: int(count[0]) for name, count in ledger.traffic.items() if count[0]}


@pytest.mark.parametrize(
    "kind", ["all-gather-kv", "ulysses", pytest.param("ring", marks=pytest.mark.proof)]
)
def test_activations_fall_with_cp(fake_world: FakeWorld, kind: str) -> None:
    """Up to 1 M tokens: what a rank keeps of a micro-batch depends on its own tokens alone."""
    found = []
    for cp, length in ((1, 2**17), (8, 2**20)):
        fake_world(cp)
        resolved = resolve(
            load({"train_micro_batch_size_per_gpu": 1, "parallel": {"cp": cp, "context": kind}}),
            world_size=cp,
        )
        model = cases.build("wide", tied=False, dtype=torch.float32)
        (measured,) = rank_activations(
            Parts(model, find_blocks(model)),
            mesh=build_mesh(resolved.layout),
            batch=token_batch(1, length),
            techniques=ActivationTechniques.of(resolved),
        )
        (stage,) = measured.stages
        found.append((sum(stage.modes["none"].saved), stage.modes["none"].head))
    (alone, head), *parts = found
    for kept, own_head in parts:
        assert own_head == pytest.approx(
            head, rel=1e-2
        )  # the labels, which are shifted before they are cut
        assert kept == pytest.approx(
            alone, rel=0.1 if kind != "ulysses" else 0.35
        )  # key-value heads that are repeated
