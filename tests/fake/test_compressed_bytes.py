"""Bytes on the wire and in memory of every compression at every stage, counted, equal to the ledger's formula."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from plait.comm.compress import POWERSGD_START
from tests.covers import cover
from tests.fake.worlds import FakeWorld, batch, build, predicted
from tests.measured.memory import measure_step
from tests.measured.traffic import count_traffic
from tests.parity.data_parallel import settings

SHARDED: dict[str, dict[str, Any]] = {
    "int8 gradients": {"compress_gradients": "int8"},
    "int4 gradients with feedback": {"compress_gradients": "int4", "error_feedback": True},
    "int8 weights": {"compress_weights": "int8"},
    "int4 both": {"compress_gradients": "int4", "compress_weights": "int4"},
    "none": {},
}
BUCKETS: dict[str, dict[str, Any]] = {
    "int8": {"compress_gradients": "int8"},
    "int4": {"compress_gradients": "int4"},
    "int4 without feedback": {"compress_gradients": "int4", "error_feedback": False},
    "powersgd": {"compress_gradients": "powersgd", "powersgd_rank": 2},
}


def check(
    world: FakeWorld,
    config: dict[str, Any],
    *,
    ranks: int,
    rank: int,
    kind: str,
    steps: int = 1,
    slack: int = 0,
) -> dict[str, int]:
    """Returns what was sent."""
    world(ranks, rank)
    engine, resolved, facts = build(kind, config, ranks)
    accumulation = config["gradient_accumulation_steps"]
    data: Any = {**batch(accumulation), "side": True} if kind == "frozen" else batch(accumulation)
    for _ in range(steps):
        held = measure_step(engine, data)
    with count_traffic() as traffic:
        engine.train_batch(data)
    ledger = predicted(resolved, facts, rank)
    assert held == {kind: int(count[0]) for kind, count in ledger.memory.items()}
    sent = {kind: count for kind, count in traffic.bytes().items() if kind != "control"}
    expected = {kind: int(count[0]) for kind, count in ledger.traffic.items() if count[0]}
    assert set(sent) == set(expected)
    assert all(abs(sent[kind] - expected[kind]) <= slack for kind in sent), (sent, expected)
    return sent


LAYOUTS = [(2, 1, 1, 0), (5, 2, 1, 4), (7, 3, 1, 6), (8, 1, 2, 0), (8, 2, 2, 0), (8, 3, 2, 0)]


@pytest.mark.parametrize(
    ("ranks", "stage", "replicas", "rank", "kind", "accumulation", "compression"),
    cover(
        (
            (*layout, *others)
            for layout in LAYOUTS
            for others in product(("llama", "frozen"), (1, 3), SHARDED)
        ),
        features=lambda ranks, stage, replicas, rank, *others: (
            (ranks, stage, replicas, rank),
            *others,
        ),
    ),
)
def test_sharded(
    fake_world: FakeWorld,
    kind: str,
    ranks: int,
    stage: int,
    replicas: int,
    rank: int,
    accumulation: int,
    compression: str,
) -> None:
    config = settings(ranks, stage, replicas, accumulation)
    config["parallel"] |= SHARDED[compression]
    check(fake_world, config, ranks=ranks, rank=rank, kind=kind)


@pytest.mark.parametrize(
    ("copy", "weights", "kind"), cover(product((2, 4), ("none", "int8"), ("llama", "frozen")))
)
def test_second_copy(fake_world: FakeWorld, kind: str, weights: str, copy: int) -> None:
    """The backward gathers from fewer ranks, so it receives less from others."""
    config = settings(8, 3, 1, 2)
    config["parallel"] |= {"compress_weights": weights}
    without = check(fake_world, config, ranks=8, rank=0, kind=kind)
    config["parallel"] |= {"secondary_partition": copy}
    assert (
        check(fake_world, config, ranks=8, rank=0, kind=kind)["all_gather"] < without["all_gather"]
    )


@pytest.mark.parametrize(
    ("ranks", "kind", "bucket_mib", "compression"),
    cover(product((2, 5), ("llama", "frozen"), (0.001, 0.02, 25), BUCKETS)),
)
def test_stage_0(
    fake_world: FakeWorld, ranks: int, kind: str, bucket_mib: float, compression: str
) -> None:
    """Each all-reduce is counted to the byte, so their sum may be off by one a bucket."""
    config = settings(ranks, 0, 1, 3)
    config["parallel"] |= {**BUCKETS[compression], "bucket_mib": bucket_mib}
    steps = POWERSGD_START if compression == "powersgd" else 1
    check(
        fake_world,
        config,
        ranks=ranks,
        rank=0,
        kind=kind,
        steps=steps,
        slack=30 if ranks == 5 else 0,
    )


@pytest.mark.parametrize(
    ("ranks", "wire", "bucket_mib", "algorithm"),
    cover(
        product(
            (2, 5, 8),
            ("fp32", "bf16"),
            (0.02, 25),
            ("all-reduce", "reduce-scatter+all-gather", "ring", "recursive-doubling"),
        ),
    ),
)
def test_algorithms(
    fake_world: FakeWorld, ranks: int, wire: str, bucket_mib: float, algorithm: str
) -> None:
    """Each message is counted to the byte, so their sum may be off by one a message."""
    config = settings(ranks, 0, 1, 2, communication_data_type=wire)
    config["parallel"] |= {"all_reduce": algorithm, "bucket_mib": bucket_mib}
    check(fake_world, config, ranks=ranks, rank=0, kind="llama", slack=0 if ranks == 2 else 20)


def test_int8_is_a_quarter_of_float32_and_int4_an_eighth(fake_world: FakeWorld) -> None:
    """Of matrices that blocks fit; the tiny ones of other tests are mostly padding."""
    sizes = {}
    for name, extra in (
        ("none", {}),
        ("int8", SHARDED["int8 gradients"]),
        ("int4", SHARDED["int4 both"]),
    ):
        fake_world(2)
        from tests.parity.cases import PlainModel

        with torch.device("meta"):
            model = PlainModel(tied=False, width=512)
        import plait

        config = settings(2, 2, 1, 1)
        config["parallel"] |= extra
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
        with count_traffic() as traffic:
            engine.train_batch({**batch(1), "side": True})
        sizes[name] = traffic.bytes()["reduce_scatter"]
    assert sizes["none"] / sizes["int8"] == pytest.approx(3.9, abs=0.05)
    assert sizes["none"] / sizes["int4"] == pytest.approx(7.6, abs=0.1)
