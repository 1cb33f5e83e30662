"""Measured bytes, of memory and on the wire, equal the ledger's for every stage, from 1 to 1,024 ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from plait.model.facts import model_facts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from plait.parallel.techniques.data_parallel import DataParallel
from plait.parallel.techniques.mixed_precision import Precision
from tests.covers import cover
from tests.fake.worlds import FakeWorld, batch, build, predicted
from tests.measured.memory import measure_step
from tests.measured.traffic import count_traffic
from tests.parity import cases
from tests.parity.data_parallel import settings

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16 on the wire": {"bf16": {"enabled": True}, "communication_data_type": "bf16"},
    "fp32, bf16 on the wire": {"communication_data_type": "bf16"},
}


LAYOUTS = [
    (4, 0, 1, 0),
    (1, 0, 1, 0),
    (2, 1, 1, 0),
    (5, 2, 1, 4),
    (7, 3, 1, 6),
    (8, 1, 2, 0),
    (8, 2, 2, 0),
    (8, 3, 2, 0),
]


@pytest.mark.parametrize(
    ("world", "stage", "replicas", "rank", "kind", "accumulation", "precision"),
    cover(
        (
            (*layout, *others)
            for layout in LAYOUTS
            for others in product(("llama", "frozen"), (1, 3), PRECISIONS)
        ),
        features=lambda world, stage, replicas, rank, *others: (
            (world, stage, replicas, rank),
            *others,
        ),
    ),
)
def test_memory_and_traffic(
    fake_world: FakeWorld,
    kind: str,
    world: int,
    stage: int,
    replicas: int,
    rank: int,
    accumulation: int,
    precision: str,
) -> None:
    """Every kind, exact."""
    fake_world(world, rank)
    config = settings(world, stage, replicas, accumulation, **PRECISIONS[precision])
    engine, resolved, facts = build(kind, config, world)
    if kind == "frozen":  # every parameter takes part, the side branch too
        data: Any = {**batch(accumulation), "side": True}
    else:
        data = batch(accumulation)
    held = measure_step(engine, data)
    with count_traffic() as traffic:
        engine.train_batch(data)
    ledger = predicted(resolved, facts, rank)
    assert held == {kind: int(count[0]) for kind, count in ledger.memory.items()}
    sent = {kind: count for kind, count in traffic.bytes().items() if kind != "control"}
    assert sent == {kind: int(count[0]) for kind, count in ledger.traffic.items() if count[0]}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_of_1_to_1024_ranks(fake_world: FakeWorld, stage: int) -> None:
    """MISSION Z1: the first rank's states, measured, for every power of two."""
    for world in (1, 2, 4, 16, 64, 256, 1024):
        fake_world(world)
        engine, resolved, facts = build("llama", settings(world, stage, 1, 1), world)
        held = measure_step(engine, batch(1))
        assert held == {
            kind: int(count[0]) for kind, count in predicted(resolved, facts, 0).memory.items()
        }, world


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_traffic_does_not_grow_with_the_batch(fake_world: FakeWorld, stage: int) -> None:
    """MISSION D2: samples and sequence double, bytes do not."""
    fake_world(4)
    sent = []
    for samples, length in ((2, 8), (4, 8), (2, 16)):
        config = settings(4, stage, 1, 1) | {"train_micro_batch_size_per_gpu": samples}
        engine, *_ = build("llama", config, 4)
        with count_traffic() as traffic:
            engine.train_batch(batch(1, samples=samples, length=length))
        sent.append(traffic.bytes())
    assert sent[0] == sent[1] == sent[2]


def test_accumulation_divides_the_traffic_of_a_sample(fake_world: FakeWorld) -> None:
    """MISSION D3: stages 0 and 1 send the same for k micro-batches as for one."""
    fake_world(4)
    for stage in (0, 1):
        sent = []
        for accumulation in (1, 4):
            engine, *_ = build("llama", settings(4, stage, 1, accumulation), 4)
            with count_traffic() as traffic:
                engine.train_batch(batch(accumulation))
            sent.append(traffic.bytes())
        assert sent[0] == sent[1]


def test_100_000_candidates_in_one_call() -> None:
    """The ledger prices a whole search space at once, and an entry of it is the single candidate's figure."""
    facts = model_facts(
        cases.build("llama", tied=True, dtype=torch.float32), ("model.layers.0", "model.layers.1")
    )
    generator = np.random.default_rng(0)
    many = 100_000
    stage = generator.integers(0, 4, many)
    shard = np.where(stage == 0, 1, 2 ** generator.integers(0, 11, many))
    ledger = Ledger.start(
        dp_replicate=2 ** generator.integers(0, 4, many),
        dp_shard=shard,
        accumulation=generator.integers(1, 9, many),
    )
    whole = account_all((Precision(), DataParallel.sweep(stage=stage)), ledger, facts)
    for index in range(0, many, 9973):
        one = Ledger.start(
            dp_replicate=ledger.dp_replicate[index],
            dp_shard=shard[index],
            accumulation=ledger.accumulation[index],
        )
        single = account_all((Precision(), DataParallel.sweep(stage=stage[index])), one, facts)
        for table, wanted in ((whole.memory, single.memory), (whole.traffic, single.traffic)):
            assert {kind: int(count[index]) for kind, count in table.items()} == {
                kind: int(count[0]) for kind, count in wanted.items()
            }


@pytest.mark.parametrize(
    ("world", "stage", "kind"), [(1, 0, "llama"), (3, 1, "gpt2"), (2, 2, "llama"), (4, 3, "qwen3")]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_updates_in_the_backward(
    fake_world: FakeWorld, world: int, stage: int, kind: str, precision: str
) -> None:
    """The gradients of one unit, of one parameter where nothing is sharded; everything else as without."""
    fake_world(world)
    found = []
    for in_backward in (False, True):
        config = settings(world, stage, 1, 1, **PRECISIONS[precision])
        config["gradient_clipping"] = 0
        if "bf16" in config:
            config["bf16"] = {"enabled": True, "check_grad_overflow": False}
        config["parallel"] |= {"unused_parameters": False, "optimizer_in_backward": in_backward}
        engine, resolved, facts = build(kind, config, world)
        held = measure_step(engine, batch(1))
        ledger = predicted(resolved, facts, 0)
        assert held == {
            name: int(ledger.memory[name][0]) if name in ledger.memory else 0 for name in held
        }
        found.append(held)
    at_end, inside = found
    assert inside["gradients"] < at_end["gradients"]
    assert {**inside, "gradients": 0} == {**at_end, "gradients": 0}
