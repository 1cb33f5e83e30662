"""What a report asks of the planner beyond a plan: the bytes of every rank, the walk, a sample of the candidates."""

from dataclasses import replace

import pytest

from plait.errors import InputError
from plait.planner.calibrate import uncalibrated
from plait.planner.choice import price
from plait.planner.constants import Rates
from plait.planner.detail import COSTS, rank_memory, sample, terms_outside_pipeline, timeline
from plait.planner.hardware import cluster
from plait.planner.job import RECOMPUTE, SCHEDULES
from plait.planner.models import find_model
from plait.planner.request import Request, space_of
from plait.planner.search import plan
from plait.planner.simulate import RANK_TERMS
from plait.planner.step import TERMS


def asked(model="llama-3-8b", gpus=32, batch=128, **changes):
    return Request(find_model(model, sequence=4096), cluster("h100", gpus), batch, 4096, **changes)


def one(schedule, *, pp, vpp=1, m=16, request=None, **changes):
    """(request, the price of one layout)."""
    request = request or asked()
    at = {
        "pp": pp,
        "vpp": vpp,
        "schedule": SCHEDULES.index(schedule),
        "accumulation": m,
        "dp_shard": 32 // pp,
        "stage": 1,
        **changes,
    }
    return request, price(request, [at])[0]


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp"),
    [
        ("none", 1, 1),
        ("gpipe", 4, 1),
        ("1f1b", 2, 1),
        ("1f1b", 8, 1),
        ("interleaved", 4, 2),
        ("interleaved-zb", 4, 4),
        ("zbv", 4, 2),
    ],
)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_fullest_rank_is_the_choice(schedule, pp, vpp, stage):
    if stage == 3 and schedule in ("interleaved-zb", "zbv"):
        stage = 2
    request, choice = one(
        schedule,
        pp=pp,
        vpp=vpp,
        stage=stage,
        dp_replicate=1 if stage else 32 // pp,
        dp_shard=32 // pp if stage else 1,
    )
    ranks = rank_memory(request, choice)
    fullest = max(ranks, key=lambda rank: sum(rank.terms[name] for name in choice.memory_terms))
    assert fullest.needed == pytest.approx(choice.needed, rel=1e-12)
    assert fullest.needed_high == pytest.approx(choice.needed_high, rel=1e-12)
    assert fullest.moment == choice.moment
    for name, size in choice.memory_terms.items():
        assert fullest.terms[name] == pytest.approx(size, rel=1e-12)
    for rank in ranks:
        assert rank.needed == pytest.approx(sum(rank.terms.values()))
    assert len(ranks) == pp


def test_1f1b_holds_less_on_every_rank():
    """Whatever the moment of its peak is, and however the layers are cut."""
    request, choice = one("1f1b", pp=4)
    first, second, third, _ = (rank.terms["activations"] for rank in rank_memory(request, choice))
    assert first > second > third


def test_a_v_of_stages_has_both_ends_on_rank_0():
    first, *others = rank_memory(*one("zbv", pp=4, vpp=2))
    _, second, *_, last = rank_memory(*one("interleaved-zb", pp=4, vpp=2))
    for name in ("weights", "optimizer"):
        assert first.terms[name] > max(other.terms[name] for other in others)
    assert last.terms["weights"] != second.terms["weights"]


def test_an_inner_rank_with_more_layers_counts():
    """126 layers in 64 chunks of two, some of one where the ends are: an inner rank holds more than rank 0."""
    request = replace(asked("llama-3-405b", gpus=512), global_batch=64)
    at = {
        "pp": 32,
        "vpp": 2,
        "schedule": SCHEDULES.index("interleaved-zb"),
        "tp": 8,
        "sp": 1,
        "dp_shard": 2,
        "stage": 1,
    }
    choice = price(request, [at | {"accumulation": 32, "recompute": RECOMPUTE.index("operators")}])[
        0
    ]
    ranks = rank_memory(request, choice)
    fullest = max(ranks, key=lambda rank: rank.needed)
    assert fullest.needed == pytest.approx(choice.needed, rel=0.01)
    assert len({rank.terms["activations"] for rank in ranks}) > 1


def test_a_schedule_without_a_table_has_no_timeline():
    request, choice = one("zb-h1", pp=4, request=asked(everything=True))
    assert len(rank_memory(request, choice)) == 4
    with pytest.raises(InputError, match="zb-h1 is priced by its published formula"):
        timeline(request, choice)


@pytest.mark.parametrize("gpus", [8, 64])
def test_the_walk_and_the_other_terms_are_the_step(gpus):
    found = plan(asked(gpus=gpus))
    for choice in found.best:
        walked = timeline(found.request, choice)
        on_top = terms_outside_pipeline(choice, walked)
        assert (
            walked.total + sum(on_top.values()) == pytest.approx(choice.seconds)
            and min(on_top.values()) > 0
        )
        rest = sum(choice.terms[name] for name in TERMS if name not in (*RANK_TERMS, "idle"))
        assert walked.total + rest <= choice.seconds * (1 + 1e-9)
        assert (
            walked.schedule.pp == choice.layout["pp"]
            and walked.schedule.microbatches == choice.layout["accumulation"]
        )
        if choice.terms["idle"] > 0 or choice.layout["pp"] == 1:
            assert walked.total + rest == pytest.approx(choice.seconds)


def test_too_many_actions_are_not_walked():
    request, choice = one("1f1b", pp=8, m=8192)
    with pytest.raises(InputError, match="8 stages and 8192 micro-batches need more than 60,000"):
        timeline(request, choice)


def test_a_sample_is_of_the_candidates_and_spans_them():
    request = asked()
    found = sample(request)
    space = space_of(request)
    assert found.candidates == space.size and 100 < len(found.points) <= 81 * 33
    assert len({(round(p.seconds, 9), p.needed) for p in found.points}) > 0.9 * len(found.points)
    room = float(request.cluster.device.memory_bytes)
    assert {p.fits for p in found.points} == {True, False}
    for point in found.points[:: max(len(found.points) // 40, 1)]:
        again = price(request, [point.layout])[0]
        assert (point.seconds, point.needed) == pytest.approx((again.seconds, again.needed))
        assert point.fits == (point.needed <= room)
        costs = {group: sum(again.terms[name] for name in names) for group, names in COSTS.items()}
        assert point.cost == max(costs, key=lambda group: costs[group])
        assert point.cost_share == pytest.approx(costs[point.cost] / again.seconds)
    fastest = min(p.seconds for p in found.points if p.fits)
    assert fastest <= plan(request).best[0].seconds * (1 + 1e-9)


def test_a_sample_keeps_what_is_fixed():
    found = sample(asked(), fixed={"tp": 4})
    assert {p.layout["tp"] for p in found.points} == {4} and found.candidates < sample(
        asked()
    ).candidates


def test_a_calibration_moves_the_details():
    request, choice = one("1f1b", pp=4)
    plain = uncalibrated()
    slow = Rates({**plain.time.rates.values, "overall": 0.5 * plain.time.rates["overall"]})
    moved = replace(plain, time=replace(plain.time, rates=slow))
    assert (
        timeline(request, choice, calibration=moved).total > 1.2 * timeline(request, choice).total
    )
    before, after = sample(request), sample(request, calibration=moved)
    assert min(p.seconds for p in after.points) > 1.2 * min(p.seconds for p in before.points)


def test_every_group_of_costs_is_a_term_once():
    named = [name for names in COSTS.values() for name in names]
    computation = {"products", "attention", "elementwise", "head"}
    assert sorted(named) == sorted(set(TERMS) - computation)
