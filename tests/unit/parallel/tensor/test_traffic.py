"""Traffic of tensor parallelism as the ledger counts it, without a process group."""

from dataclasses import replace

import pytest

from plait.model.facts import model_facts
from plait.model.plans import make_plan
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.techniques.tensor_parallel import TensorParallel

transformers = pytest.importorskip("transformers")


def traffic(tied, technique):
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config)
    blocks = ("model.layers.0", "model.layers.1")
    plan = make_plan(model, tp=2, user=None, blocks=blocks)
    facts = replace(model_facts(model, blocks), tensor_plan=plan)
    ledger = technique.account(Ledger.start(tp=2, tokens=8), facts)
    return {collective: int(count[0]) for collective, count in ledger.traffic.items()}


def test_a_tied_head_sends_as_much_as_an_untied_one():
    """The head reads hidden states and returns logits, whoever owns its weight."""
    for technique in (
        TensorParallel(),
        TensorParallel(loss_parallel=False),
        TensorParallel(sequence_parallel=True),
    ):
        untied = traffic(False, technique)
        assert sum(untied.values())
        assert traffic(True, technique) == untied, technique
