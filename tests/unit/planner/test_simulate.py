"""The walk of a schedule's table against the closed form and against published bubbles."""

from dataclasses import replace

import numpy as np
import pytest

from plait.planner.constants import knowledge
from plait.planner.hardware import cluster
from plait.planner.job import SCHEDULES, Layouts
from plait.planner.models import find_model
from plait.planner.request import Request, estimate, job_of
from plait.planner.step_time import simulated_terms


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
    return terms, simulated_terms(job, knowledge().rates, terms)


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


def test_zero_bubble_waits_less_than_1f1b():
    assert walked("zbv", vpp=2)[1]["idle"] < 0.5 * walked("1f1b")[1]["idle"]


def test_a_heavy_head_makes_others_wait():
    light, heavy = (walked("1f1b", pp=8, vocab=vocab)[1] for vocab in (64, 1_000_000))
    assert heavy["idle"] + heavy["head"] > light["idle"]


def test_nothing_to_walk():
    assert walked("none", pp=1)[1] is None
    assert walked("zb-h1")[1] is None  # no table of this version
    assert walked("interleaved", vpp=16)[1] is None  # more stages than layers
    assert walked("interleaved", vpp=2, m=9)[1] is None  # no whole rounds
