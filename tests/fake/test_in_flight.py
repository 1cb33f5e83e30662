"""Predicted activations after every action of a pipeline rank equal those of a real step."""

import re
from itertools import product

import pytest

from plait._torch.groups import delivered_at_once
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError
from plait.sizes import GIB
from tests.covers import proof_after
from tests.fake import pipelines
from tests.fake.activations import LAYERS, LENGTH, foretold
from tests.fake.worlds import batch
from tests.measured.memory import measure_in_flight
from tests.parity.pipelines import SCHEDULES, settings

CASES = sorted(product(SCHEDULES, (0, 1)), key=lambda case: case != ("1f1b", 0))


def with_budget(config, budget):
    section = {"budget_gib": budget / GIB, "sequence_length": LENGTH}
    return {**config, "parallel": {**config["parallel"], "recompute": section}}


def check(start, world, rank, config, share):
    """Compare a rank whose budget is a share of the way from full recompute to none."""
    start(world, rank)
    ranks = foretold(config, world)
    activations = ranks[resolve(load(config), world_size=world).layout.coordinates(rank)["pp"]]
    least = activations.least()[0]
    plain = activations.peak_bytes(("none",) * activations.blocks)
    budget = round(least + share * (plain - least))
    # Every rank has to fit.
    budget = max(budget, *(other.least()[0] for other in ranks))
    config = with_budget(config, budget)
    engine, *_ = pipelines.build(config, world, layers=LAYERS, length=LENGTH)
    modes = engine.parts.recompute_modes
    assert activations.peak_bytes(modes) <= engine.config.recompute.budget_bytes

    data = batch(4, length=LENGTH)
    with delivered_at_once():
        measured = measure_in_flight(engine, data).after
    predicted = activations.held_after(modes)
    assert [action for action, _ in measured] == [action for action, _ in predicted]
    # Scalars of the step come on top of activations: a loss and a weight per micro-batch, and a
    # factor.
    scalar_bytes = 16 * len(data["input_ids"])
    sizes = [size for _, size in measured]
    excess = [size - expected for size, (_, expected) in zip(sizes, predicted, strict=True)]
    assert min(excess) >= 0 and max(excess) <= scalar_bytes, excess
    assert max(sizes) <= activations.peak_bytes(modes) + scalar_bytes
    if engine.config.recompute.budget_bytes < plain:
        assert set(modes) != {"none"}


@pytest.mark.parametrize(("schedule", "rank"), proof_after(1, CASES))
def test_every_schedule(fake_world, schedule, rank):
    """Schedules differ in stages per rank, in their order and in split backwards."""
    check(fake_world, 2, rank, settings(0, 4, schedule, pp=2), 0.6 if rank else 0.3)


@pytest.mark.parametrize(
    ("world", "rank", "config"),
    [
        (4, 0, settings(0, 4, "1f1b", pp=2, tp=2)),
        pytest.param(
            4, 2, settings(0, 4, "zbv", pp=2, tp=2, sequence_parallel=True), marks=pytest.mark.proof
        ),
        pytest.param(4, 1, settings(0, 4, "1f1b", pp=4), marks=pytest.mark.proof),
    ],
    ids=["tp", "sp", "pp 4"],
)
def test_with_other_axes(fake_world, world, rank, config):
    check(fake_world, world, rank, config, 0.4)


def test_rank_with_more_in_flight_recomputes_more(fake_world):
    """The first rank of 1F1B holds four micro-batches, and the last rank holds a single one."""
    fake_world(4, 0)
    ranks = foretold(settings(0, 8, "1f1b", pp=4), 4)
    assert [round(rank.most_in_flight()) for rank in ranks] == [4, 3, 2, 1]
    budget = ranks[2].peak_bytes(("none",))
    modes = [rank.solve(budget) or () for rank in ranks]
    work = [rank.repeated(choice) for rank, choice in zip(ranks, modes, strict=True)]
    assert work[0] >= work[1] > work[2] == work[3] == 0
    assert ranks[0].peak_bytes(modes[0]) <= budget < ranks[0].peak_bytes(("none",))


def test_small_budget_is_refused_on_every_rank(fake_world):
    """Rank 0 raises the error of rank 1 even if its own activations fit."""
    fake_world(2, 0)
    config = settings(0, 4, "1f1b", pp=2)
    first, last = (rank.least()[0] for rank in foretold(config, 2))
    assert first < last, "the last rank has the head and its loss"
    message = (
        "rank 1 of the pipeline needs at least .* GiB .2 full.*up to 1 micro-batches in flight"
    )
    with pytest.raises(ConfigError, match=message):
        pipelines.build(with_budget(config, first), 2, layers=LAYERS)

    with pytest.raises(ConfigError, match="rank 0 of the pipeline .*use .* or more") as error:
        pipelines.build(with_budget(config, first - 1), 2, layers=LAYERS)
    advised = float(re.findall(r"use (\S+) or more", str(error.value))[0])
    assert last <= advised * GIB < 1.001 * last


@pytest.mark.parametrize(
    "schedule", [pytest.param("interleaved-1f1b", marks=pytest.mark.proof), "zbv"]
)
def test_activation_offload(fake_world, tmp_path, schedule):
    """The budget counts blocks that keep their activations, and the remainder of the others."""
    offload = {"fraction": 0.5, "device": "disk", "path": str(tmp_path)}
    check(fake_world, 2, 1, settings(0, 4, schedule, pp=2, activation_offload=offload), 0.4)
