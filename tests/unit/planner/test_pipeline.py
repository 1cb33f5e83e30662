from dataclasses import replace

import numpy as np
import pytest

from plait.planner.constants import fitted_priors
from plait.planner.hardware import cluster
from plait.planner.job import SCHEDULES, Layouts
from plait.planner.models import find_model
from plait.planner.pipeline import (
    idle_share,
    in_flight,
    in_flight_last,
    micro_batches_between_chunks,
)
from plait.planner.request import Request, estimate, job_of
from plait.planner.step_time import simulated_terms


def at(schedule, *, pp=8, m=16, vpp=1):
    return Layouts(
        pp=np.array([pp]),
        schedule=np.array([SCHEDULES.index(schedule)]),
        vpp=np.array([vpp]),
        accumulation=np.array([m]),
    )


@pytest.mark.parametrize(
    ("schedule", "vpp", "bubble"),
    # arXiv 2104.04473: (p - 1) / (v m + p - 1)
    [
        ("gpipe", 1, 7 / 23),
        ("1f1b", 1, 7 / 23),
        ("interleaved", 2, 7 / 39),
        ("interleaved", 4, 7 / 71),
    ],
)
def test_share_of_a_step_that_a_stage_waits(schedule, vpp, bubble):
    layouts = at(schedule, vpp=vpp)
    idle = 7 * idle_share(layouts)[0]  # of a micro-batch's forward and backward in a stage
    assert idle / (16 + idle) == pytest.approx(bubble)


@pytest.mark.parametrize(
    ("pp", "vpp", "m", "apart"), [(8, 1, 16, 1), (8, 4, 16, 6), (8, 4, 3, 3), (2, 2, 16, 1)]
)
def test_time_between_first_and_last_gradients_of_a_stage(pp, vpp, m, apart):
    assert micro_batches_between_chunks(at("interleaved", pp=pp, vpp=vpp, m=m))[0] == apart


def test_zero_bubble_waits_less_than_1f1b():
    waits = [float(idle_share(at(name))[0]) for name in ("1f1b", "dualpipev", "zb-h1", "zbv")]
    assert waits == sorted(waits, reverse=True) and waits[2] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("schedule", "vpp", "first"),
    [("gpipe", 1, 16), ("1f1b", 1, 8), ("interleaved", 2, 11.5), ("interleaved", 4, 9.75), ("zbv", 2, 8), ("dualpipev", 2, 8.5)],
)  # fmt: skip
def test_micro_batches_in_flight_of_the_first_stage(schedule, vpp, first):
    assert in_flight(at(schedule, vpp=vpp))[0] == pytest.approx(first)


def test_the_last_stage_of_1f1b_holds_one():
    assert in_flight_last(at("1f1b"))[0] == 1
    assert in_flight_last(at("gpipe"))[0] == 16


def test_never_more_in_flight_than_there_are():
    assert in_flight(at("1f1b", m=3))[0] == 3


def walked(schedule, *, pp=4, vpp=1, m=16, vocab=64, **changes):
    """(closed form, walk) of a small head and 32 layers."""
    model = find_model("llama-3-8b", sequence=4096)
    model = replace(model, architecture=replace(model.architecture, vocab=vocab))
    asked = Request(model, cluster("h100", 32), 64, 4096)
    at = {
        "pp": pp,
        "vpp": vpp,
        "schedule": SCHEDULES.index(schedule),
        "accumulation": m,
        "dp_shard": 32 // pp,
        "stage": 1,
        **changes,
    }
    job = job_of(asked, Layouts(**{name: np.array([value]) for name, value in at.items()}))
    terms = {name: float(np.ravel(value)[0]) for name, value in estimate(job).step.terms.items()}
    return terms, simulated_terms(job, fitted_priors().rates, terms)


@pytest.mark.parametrize(
    ("schedule", "vpp"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)]
)
def test_even_stages_wait_as_the_papers_say(schedule, vpp):
    terms, walk = walked(schedule, vpp=vpp)
    busy = sum(
        walk[name] for name in ("products", "attention", "elementwise", "recompute", "head", "host")
    )
    bubble = 3 / (16 * vpp + 3)  # (p - 1) / (v m + p - 1)
    assert walk["idle"] / (busy + walk["idle"]) == pytest.approx(bubble, abs=0.02)
    assert {name: value for name, value in walk.items() if name != "idle"} == pytest.approx(
        {n: v for n, v in terms.items() if n != "idle"}
    )


def test_a_walked_zero_bubble_waits_less_than_1f1b():
    assert walked("zbv", vpp=2)[1]["idle"] < 0.5 * walked("1f1b")[1]["idle"]


def test_a_heavy_head_makes_others_wait():
    light, heavy = (walked("1f1b", pp=8, vocab=vocab)[1] for vocab in (64, 1_000_000))
    assert heavy["idle"] + heavy["head"] > light["idle"]


def test_nothing_to_walk():
    assert walked("none", pp=1)[1] is None
    assert walked("zb-h1")[1] is None  # no table of this version
    assert walked("interleaved", vpp=16)[1] is None  # more stages than layers
    assert walked("interleaved", vpp=2, m=9)[1] is None  # no whole rounds
