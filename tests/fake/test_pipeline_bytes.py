"""Measured bytes of a pipeline rank equal the ledger's: states, traffic and unsharded tensors."""

from itertools import product

import pytest

from plait._torch.units import unsharded_gradient_bytes, unsharded_parameter_bytes
from tests.covers import cover
from tests.fake.pipelines import UnshardedBytes, build, predicted, unsharded_after
from tests.fake.worlds import STATES, FakeRank, batch, check_bytes
from tests.parity.pipelines import SCHEDULES, named, settings

BF16 = {"enabled": True, "check_grad_overflow": False}
"""Overflow is not checked, because a fake group receives arbitrary values."""


STAGES_AND_SCHEDULES = [
    *product((1, 2), SCHEDULES),
    *product((3,), SCHEDULES[:4]),  # split backwards exclude stage 3
]
CASES = [
    *(
        (4, rank, settings(stage, 4, schedule, pp=2, dp_shard=2))
        for stage, schedule in STAGES_AND_SCHEDULES
        for rank in (0, 2)
    ),
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
]


def features(world, rank, config):
    """Return the pairs of settings that decide the bytes of a pipeline rank."""
    degrees = config["parallel"]
    stage = config["zero_optimization"]["stage"]
    schedule = degrees["pipeline"]["schedule"]
    end = (rank == 0, rank == world // 2)
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
    fake_world(world, rank)
    engine, resolved, facts, pipeline = build(config, world)
    ledger = predicted(resolved, facts, pipeline, rank)
    data = batch(config["gradient_accumulation_steps"])
    check_bytes(FakeRank(engine, ledger, data), kinds=STATES)


SHARDED = [
    case
    for case in CASES
    if case[2]["zero_optimization"]["stage"] and "tp" not in case[2]["parallel"]
]


@pytest.mark.parametrize(("world", "rank", "config"), few(SHARDED))
def test_unsharded_bytes_after_every_computation(fake_world, world, rank, config):
    """Stage 2 holds no complete gradients between micro-batches, and stage 3 no complete blocks."""
    fake_world(world, rank)
    engine, resolved, facts, pipeline = build(config, world)
    assert engine.sharded.pipeline is not None
    measured = []

    def observe(action, done):
        if done:
            parameters = unsharded_parameter_bytes(engine.model)
            gradients = unsharded_gradient_bytes(engine.model)
            measured.append(UnshardedBytes(action, parameters, gradients))

    engine.sharded.pipeline.runtime.observers.append(observe)
    engine.train_batch(batch(config["gradient_accumulation_steps"]))

    shards = resolved.layout.dp_shard
    compute_bytes = 2 if resolved.precision.compute else 4
    gathered = {}
    gradients = {}
    for parameter in facts.parameters:
        rows = parameter.shape[0]
        row = parameter.numel // rows
        padded_rows = -(-rows // shards) * shards
        gathered[parameter.name] = padded_rows * row * compute_bytes
        gradients[parameter.name] = rows * row * 4
    expected = unsharded_after(
        pipeline.schedule,
        resolved.layout.coordinates(rank)["pp"],
        zero=resolved.data_parallel.stage,
        facts=facts,
        cut=pipeline.cut,
        gathered=gathered,
        gradients=gradients,
    )
    assert measured == expected
    # Tied embeddings of the end stages, and backwards in two halves, keep gradients for longer.
    is_end = engine.mesh.coordinates["pp"] in (0, resolved.layout.pp - 1)
    if resolved.data_parallel.stage >= 2 and not is_end and not pipeline.schedule.splits_backward:
        assert not any(row.unsharded_gradients for row in measured)
