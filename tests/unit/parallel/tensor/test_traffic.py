"""Bytes that the ledger counts for tensor parallelism."""

from dataclasses import replace

import pytest

from plait.model.facts import model_facts
from plait.model.plans import make_plan
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.techniques.tensor_parallel import TensorParallel
from tests.parity import cases


def traffic(tied, technique):
    model = cases.build("llama", tied=tied)
    blocks = ("model.layers.0", "model.layers.1")
    plan = make_plan(model, tp=2, user=None, blocks=blocks)
    facts = replace(model_facts(model, blocks), tensor_plan=plan)
    ledger = technique.account(Ledger.start(tp=2, tokens=8), facts)
    return {collective: int(size[0]) for collective, size in ledger.traffic.items()}


@pytest.mark.parametrize("settings", [{}, {"loss_parallel": False}, {"sequence_parallel": True}])
def test_a_tied_head_sends_as_much_as_an_untied_one(settings):
    """The head reads hidden states and returns logits, whichever module owns its weight."""
    untied = traffic(False, TensorParallel(**settings))
    assert sum(untied.values())
    assert traffic(True, TensorParallel(**settings)) == untied
