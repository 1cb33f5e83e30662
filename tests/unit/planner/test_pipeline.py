"""Idle time and micro-batches in flight, in closed form and in a simulation of the schedule."""

from dataclasses import replace

import pytest

from plait.planner.constants import fitted_priors
from plait.planner.hardware import cluster, only
from plait.planner.job import SCHEDULES
from plait.planner.models import find_model
from plait.planner.pipeline import (
    idle_share,
    in_flight,
    in_flight_last,
    micro_batches_between_chunks,
)
from plait.planner.request import Request, estimate, job_of
from plait.planner.step_time import simulated_terms
from tests.unit.planner.jobs import layouts


def pipeline(schedule, *, pp=8, m=16, vpp=1):
    """Return a layout with a pipeline of `m` micro-batches."""
    return layouts(pp=pp, schedule=SCHEDULES.index(schedule), vpp=vpp, accumulation=m)


@pytest.mark.parametrize(
    ("schedule", "vpp", "bubble"),
    # (p - 1) / (v m + p - 1) in arXiv 2104.04473.
    [
        ("gpipe", 1, 7 / 23),
        ("1f1b", 1, 7 / 23),
        ("interleaved", 2, 7 / 39),
        ("interleaved", 4, 7 / 71),
    ],
)
def test_share_of_a_step_that_a_stage_waits(schedule, vpp, bubble):
    # In units of a micro-batch's forward and backward in a stage.
    idle = 7 * only(idle_share(pipeline(schedule, vpp=vpp)))
    assert idle / (16 + idle) == pytest.approx(bubble)


@pytest.mark.parametrize(
    ("pp", "vpp", "m", "distance"), [(8, 1, 16, 1), (8, 4, 16, 6), (8, 4, 3, 3), (2, 2, 16, 1)]
)
def test_micro_batches_between_gradients_of_a_stage(pp, vpp, m, distance):
    layout = pipeline("interleaved", pp=pp, vpp=vpp, m=m)
    assert only(micro_batches_between_chunks(layout)) == distance


def test_zero_bubble_waits_less_than_1f1b():
    shares = [only(idle_share(pipeline(name))) for name in ("1f1b", "dualpipev", "zb-h1", "zbv")]
    assert shares == sorted(shares, reverse=True) and shares[2] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("schedule", "vpp", "m", "micro_batches"),
    [
        ("gpipe", 1, 16, 16),
        ("1f1b", 1, 16, 8),
        ("1f1b", 1, 3, 3),
        ("interleaved", 2, 16, 11.5),
        ("interleaved", 4, 16, 9.75),
        ("zbv", 2, 16, 8),
        ("dualpipev", 2, 16, 8.5),
    ],
)
def test_micro_batches_in_flight_of_the_first_stage(schedule, vpp, m, micro_batches):
    layout = pipeline(schedule, vpp=vpp, m=m)
    assert only(in_flight(layout)) == pytest.approx(micro_batches)


def test_the_last_stage_of_1f1b_holds_one_micro_batch():
    assert only(in_flight_last(pipeline("1f1b"))) == 1
    assert only(in_flight_last(pipeline("gpipe"))) == 16


def simulate(schedule, *, pp=4, vpp=1, m=16, vocab=64):
    """Return the terms of a step with 32 layers, in closed form and as simulated.

    The small vocabulary makes the work of all stages equal.
    """
    model = find_model("llama-3-8b", sequence=4096)
    model = replace(model, architecture=replace(model.architecture, vocab=vocab))
    request = Request(model, cluster("h100", 32), 64, 4096)
    layout = pipeline(schedule, pp=pp, vpp=vpp, m=m).as_dict(0)
    job = job_of(request, layouts(**{**layout, "dp_shard": 32 // pp, "stage": 1}))
    terms = {name: only(value) for name, value in estimate(job).step.terms.items()}
    return terms, simulated_terms(job, fitted_priors().rates, terms)


@pytest.mark.parametrize(
    ("schedule", "vpp"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)]
)
def test_simulated_idle_time_is_that_of_the_papers(schedule, vpp):
    terms, simulated = simulate(schedule, vpp=vpp)
    names = ("products", "attention", "elementwise", "recompute", "head", "host")
    busy = sum(simulated[name] for name in names)
    idle = simulated.pop("idle")
    # (p - 1) / (v m + p - 1)
    assert idle / (busy + idle) == pytest.approx(3 / (16 * vpp + 3), abs=0.02)
    del terms["idle"]
    assert simulated == pytest.approx(terms)


def test_simulated_zero_bubble_waits_less_than_1f1b():
    _, zero_bubble = simulate("zbv", vpp=2)
    assert zero_bubble["idle"] < 0.5 * simulate("1f1b")[1]["idle"]


def test_stages_wait_for_a_heavy_head():
    _, light = simulate("1f1b", pp=8)
    _, heavy = simulate("1f1b", pp=8, vocab=1_000_000)
    assert heavy["idle"] + heavy["head"] > light["idle"]


def test_layouts_without_a_schedule_are_not_simulated():
    assert simulate("none", pp=1)[1] is None
    # The engine has no table of this schedule.
    assert simulate("zb-h1")[1] is None
    # More stages than layers, and rounds that are not complete.
    assert simulate("interleaved", vpp=16)[1] is None
    assert simulate("interleaved", vpp=2, m=9)[1] is None
