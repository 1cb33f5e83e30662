"""Bytes of a pipeline's rank, measured, equal the ledger's: states, traffic, and what is unsharded after every computation."""

import pytest

from plait._torch.units import unsharded_gradient_bytes, unsharded_parameter_bytes
from tests.covers import cover
from tests.fake.pipelines import UnshardedBytes, build, predicted, unsharded_after
from tests.fake.worlds import STATES, FakeRank, batch, check_bytes
from tests.parity.pipelines import SCHEDULES, named, settings

BF16 = {"enabled": True, "check_grad_overflow": False}
"""What a fake group receives is whatever the memory held, so nothing may depend on the values."""


CASES = [
    *((4, rank, settings(stage, 4, schedule, pp=2, dp_shard=2)) for stage in (1, 2) for schedule in SCHEDULES for rank in (0, 2)),
    *((4, rank, settings(3, 4, schedule, pp=2, dp_shard=2)) for schedule in SCHEDULES[:4] for rank in (0, 2)),
    (12, 4, settings(3, 6, "1f1b", pp=4, dp_shard=3)),
    (12, 7, settings(2, 6, "1f1b", pp=4, dp_shard=3, bf16=BF16)),
    (8, 6, settings(2, 4, "zbv", pp=2, dp_shard=4, bf16=BF16)),
    (8, 0, settings(3, 4, "interleaved-1f1b", pp=2, dp_replicate=2, dp_shard=2, bf16=BF16)),
    (4, 1, settings(0, 4, "1f1b", pp=2, dp_replicate=2)),
    (8, 0, settings(2, 4, "1f1b", pp=2, dp_shard=2, tp=2)),
    (16, 13, settings(1, 4, "zbv", pp=2, dp_shard=4, tp=2)),
    (12, 0, settings(3, 4, "1f1b", pp=2, dp_shard=3, tp=2, sequence_parallel=True)),
    (20, 19, settings(2, 4, "interleaved-1f1b", pp=2, dp_shard=5, tp=2, sequence_parallel=True)),
    (1024, 1016, settings(3, 16, "1f1b", pp=8, dp_shard=128)),
]  # fmt: skip


def features(world, rank, config):
    """What decides the bytes of a pipeline's rank."""
    degrees, stage = config["parallel"], config["zero_optimization"]["stage"]
    schedule, end = degrees["pipeline"]["schedule"], (rank == 0, rank == world // 2)
    axes = {(axis, stage) for axis in degrees if axis != "pipeline"}
    return frozenset({(schedule, min(stage, 2)), (schedule, end), (stage, end), *axes})


def few(cases):
    return cover(
        cases,
        strength=1,
        features=features,
        name=lambda world, rank, config: f"rank{rank}-{named(config)}",
    )


@pytest.mark.parametrize(("world", "rank", "config"), few(CASES))
def test_states_and_traffic(fake_world, world, rank, config):
    """Exact, every kind."""
    fake_world(world, rank)
    engine, resolved, facts, pipeline = build(config, world)
    ledger = predicted(resolved, facts, pipeline, rank)
    check_bytes(
        FakeRank(engine, ledger, batch(config["gradient_accumulation_steps"])), kinds=STATES
    )


SHARDED = [
    case
    for case in CASES
    if case[2]["zero_optimization"]["stage"] and "tp" not in case[2]["parallel"]
]


@pytest.mark.parametrize(("world", "rank", "config"), few(SHARDED))
def test_what_is_unsharded_after_every_computation(fake_world, world, rank, config):
    """ZeRO's meaning in bytes, which a pipeline must not lose: between micro-batches stage 2 holds no whole gradients, stage 3 no whole
    blocks."""
    fake_world(world, rank)
    engine, resolved, facts, pipeline = build(config, world)
    assert engine.sharded.pipeline is not None
    found = []

    def look(action, done):
        if done:
            found.append(
                UnshardedBytes(
                    action,
                    unsharded_parameter_bytes(engine.model),
                    unsharded_gradient_bytes(engine.model),
                )
            )

    engine.sharded.pipeline.runtime.observers.append(look)
    engine.train_batch(batch(config["gradient_accumulation_steps"]))
    n = resolved.layout.dp_shard
    compute, reduce = (2, 4) if resolved.precision.compute else (4, 4)
    rows = {
        p.name: (-(-p.shape[0] // n) * n, p.shape[0], p.numel // p.shape[0])
        for p in facts.parameters
    }
    expected = unsharded_after(
        pipeline.schedule,
        resolved.layout.coordinates(rank)["pp"],
        zero=resolved.data_parallel.stage,
        facts=facts,
        cut=pipeline.cut,
        gathered={name: padded * row * compute for name, (padded, _, row) in rows.items()},
        gradients={name: count * row * reduce for name, (_, count, row) in rows.items()},
    )
    assert found == expected
    if resolved.data_parallel.stage >= 2:
        blocks_only = [held for held in found if held.unsharded_gradients]
        assert (
            not blocks_only
            or pipeline.schedule.splits_backward
            or engine.mesh.coordinates["pp"] in (0, resolved.layout.pp - 1)
        )
