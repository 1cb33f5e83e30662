"""One device alone: its optimizer can be on the host, and a file may name any ZeRO stage."""

import pytest

from plait.planner.hardware import cluster
from plait.planner.models import find_model
from plait.planner.request import Request
from plait.planner.search import plan


def request(model):
    return Request(find_model(model, sequence=2048), cluster("h100", 1), 32, 2048)


def test_states_that_do_not_fit_are_on_the_host():
    best = plan(request("llama-3-8b")).best[0].layout
    assert (best["stage"], best["dp_shard"]) == (1, 1) and best["offload"] > 0


def test_one_that_fits_has_it_on_the_device():
    """And ZeRO stages, which are alike with one shard, are not shown beside each other."""
    best = [choice.layout for choice in plan(request("gpt2")).best]
    assert best[0]["stage"] == 0 and best[0]["offload"] == 0
    assert all(layout["offload"] > 0 for layout in best[1:] if layout["stage"])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_that_a_file_fixes_is_kept(stage):
    for fixed in ({"stage": stage}, {"stage": stage, "offload": 100}):
        best = plan(request("gpt2"), fixed=fixed).best[0].layout
        assert best["stage"] == stage and best["offload"] == fixed.get("offload", 0) / 100
