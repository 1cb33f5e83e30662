"""Activations of a pipeline's rank: what is foretold of every action of its row is what a real step holds then, to the byte."""

import re

import pytest

from plait._torch.groups import delivered_at_once
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError
from plait.sizes import GIB
from tests.fake import pipelines
from tests.fake.activations import LAYERS, LENGTH, foretold
from tests.fake.worlds import batch
from tests.measured.memory import measure_in_flight
from tests.parity.pipelines import SCHEDULES, settings


def with_budget(config, budget):
    section = {"budget_gib": budget / GIB, "sequence_length": LENGTH}
    return {**config, "parallel": {**config["parallel"], "recompute": section}}


def check(start, world, rank, config, share):
    """With a budget of `share` between the least and what is held without recompute, on this rank."""
    start(world, rank)
    ranks = foretold(config, world)
    at = ranks[resolve(load(config), world_size=world).layout.coordinates(rank)["pp"]]
    least, plain = at.least()[0], at.peak_bytes(("none",) * at.blocks)
    budget = round(least + share * (plain - least))
    engine, *_ = pipelines.build(
        with_budget(config, max(budget, *(one.least()[0] for one in ranks))),
        world,
        layers=LAYERS,
        length=LENGTH,
    )
    chosen, data = engine.parts.recompute_modes, batch(4, length=LENGTH)
    assert at.peak_bytes(chosen) <= engine.config.recompute.budget_bytes
    with delivered_at_once():
        measured = measure_in_flight(engine, data).after
    predicted = at.held_after(chosen)
    assert [action for action, _ in measured] == [action for action, _ in predicted]
    # The step's own 0-dimensional numbers come on top of activations: a loss and a weight per micro-batch, and a factor.
    numbers_bytes = 16 * len(data["input_ids"])
    excess = [held - expected for (_, held), (_, expected) in zip(measured, predicted, strict=True)]
    assert min(excess) >= 0 and max(excess) <= numbers_bytes, excess
    assert max(held for _, held in measured) <= at.peak_bytes(chosen) + numbers_bytes
    if share < 1 and engine.config.recompute.budget_bytes < plain:
        assert set(chosen) != {"none"}


@pytest.mark.parametrize(
    ("schedule", "rank"),
    [
        pytest.param(
            schedule,
            rank,
            marks=[] if schedule in ("1f1b", "zbv") and (index + rank) % 2 else pytest.mark.proof,
        )
        for index, schedule in enumerate(SCHEDULES)
        for rank in (0, 1)
    ],
)
def test_every_schedule(fake_world, schedule, rank):
    """Several stages on a rank, in a row and in a V; backwards in halves."""
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


def test_a_rank_with_more_in_flight_recomputes_more(fake_world):
    """Each for itself: the first rank of 1F1B holds four micro-batches and the last one."""
    fake_world(4, 0)
    ranks = foretold(settings(0, 8, "1f1b", pp=4), 4)
    assert [round(rank.most_in_flight()) for rank in ranks] == [4, 3, 2, 1]
    budget = ranks[2].peak_bytes(("none",))
    work = [rank.repeated(rank.solve(budget) or ()) for rank in ranks]
    assert work[0] >= work[1] > work[2] == work[3] == 0
    assert (
        ranks[0].peak_bytes(ranks[0].solve(budget) or ()) <= budget < ranks[0].peak_bytes(("none",))
    )


def test_what_cannot_be_kept_is_refused_on_every_rank(fake_world):
    """With the numbers of the ranks that cannot, also where this one could."""
    fake_world(2, 0)
    config = settings(0, 4, "1f1b", pp=2)
    first, last = (rank.least()[0] for rank in foretold(config, 2))
    assert first < last, "the head and its loss"
    with pytest.raises(
        ConfigError,
        match="rank 1 of the pipeline needs at least .* GiB .2 full.*1f1b has up to 1 micro-batches in flight there",
    ):
        pipelines.build(with_budget(config, first), 2, layers=LAYERS)
    with pytest.raises(ConfigError, match="rank 0 of the pipeline .*use .* or more") as error:
        pipelines.build(with_budget(config, first - 1), 2, layers=LAYERS)
    advised = float(re.findall(r"use (\S+) or more", str(error.value))[0])
    assert last <= advised * GIB < 1.001 * last


@pytest.mark.parametrize(
    ("schedule", "rank"), [pytest.param("interleaved-1f1b", 1, marks=pytest.mark.proof), ("zbv", 1)]
)
def test_with_a_store(fake_world, tmp_path, schedule, rank):
    """Half of the blocks put what they save into files; the budget is solved for the others and for what stays of those."""
    offload = {"fraction": 0.5, "device": "disk", "path": str(tmp_path)}
    check(fake_world, 2, rank, settings(0, 4, schedule, pp=2, activation_offload=offload), 0.4)
