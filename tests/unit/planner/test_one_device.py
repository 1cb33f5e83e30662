"""On a single device the optimizer can be on the host, and a file may fix any ZeRO stage."""

import pytest

from plait.planner.hardware import cluster
from plait.planner.models import find_model
from plait.planner.request import Request
from plait.planner.search import plan


def layouts_of(model, **fixed):
    """Return the best layouts of a model on one H100."""
    request = Request(find_model(model, sequence=2048), cluster("h100", 1), 32, 2048)
    return [choice.layout for choice in plan(request, fixed=fixed).best]


def test_states_that_do_not_fit_are_on_the_host():
    best = layouts_of("llama-3-8b")[0]
    assert (best["stage"], best["dp_shard"]) == (1, 1) and best["offload"] > 0


def test_stages_that_do_not_differ_are_shown_once():
    best, *others = layouts_of("gpt2")
    assert best["stage"] == 0 and best["offload"] == 0
    for layout in others:
        assert layout["offload"] > 0 or not layout["stage"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_fixed_stage_is_kept(stage):
    for offload in (0, 100):
        fixed = {"stage": stage, "offload": offload} if offload else {"stage": stage}
        best = layouts_of("gpt2", **fixed)[0]
        assert best["stage"] == stage and best["offload"] == offload / 100
