"""Activations of families without a formula are counted, and a note says when they are not."""

import pytest

from plait.model.blocks import find_blocks
from plait.planner import built as module
from plait.planner.built import built, counted, not_counted
from plait.planner.hardware import cluster
from plait.planner.request import Request, formula_notes
from tests.unit.planner.jobs import model_of

pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "intermediate_size": 96,
}
RUN = {"sequence": 24, "precision": "bf16", "on_cores": False}


def section(kind, **fields):
    """Return the section `model` of a configuration."""
    return {"config": {"model_type": kind, **SIZES, **fields}}


def test_code_that_reads_values_is_not_counted():
    sizes = {"num_experts_per_tok": 1, "num_key_value_heads": 2, "kv_channels": 16}
    model = section("jetmoe", num_local_experts=2, **sizes)
    assert counted(model, "jetmoe", **RUN) is None
    note = not_counted(model, "jetmoe", compiled=False, **RUN)
    assert (
        "jetmoe: the bytes that its blocks keep for the backward are computed by a formula" in note
    )
    assert "(its blocks do not run without data), which may be too low" in note


def test_a_note_has_the_reason_that_nothing_is_counted(monkeypatch):
    model = section("gemma2", num_key_value_heads=2, head_dim=16)
    assert not_counted(model, "gemma2", compiled=False, **RUN) is None
    note = not_counted(model, "gemma2", compiled=True, **RUN)
    assert "(blocks are compiled), which leaves out more than a third of what they keep" in note
    # Formulas cover this family.
    assert not_counted(section("llama"), "llama", compiled=True, **RUN) is None
    assert counted({"path": "no/such/folder"}, "gemma2", **RUN) is None
    # Transformers is not installed.
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert counted(model, "gemma2", **RUN) is None
    note = not_counted(model, "gemma2", compiled=False, **RUN)
    assert "(Transformers is not installed)" in note


def test_dropout_of_scores_in_memory_is_counted_for_gpus():
    """A GPU keeps a mask of one byte. On CPU cores the mask is as wide as the result."""
    kind = "gpt_neox_japanese"
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.1}
    model = section(kind, intermediate_multiple_size=2, **dropout)
    gpu = counted(model, kind, **RUN)
    cores = counted(model, kind, **{**RUN, "on_cores": True})
    scores = SIZES["num_attention_heads"] * RUN["sequence"]
    assert not gpu.dropping and gpu.none.scores and gpu.dropped_scores == pytest.approx(3 * scores)
    assert cores.dropping and not cores.dropped_scores
    assert cores.none.scores - gpu.none.scores == pytest.approx(4 * scores)


@pytest.mark.parametrize(
    ("kind", "fields", "lengths"),
    [
        ("jamba", {"num_experts": 2, "num_key_value_heads": 2}, (32, 16)),
        ("recurrent_gemma", {}, (32, 16)),
        ("gemma2", {"num_key_value_heads": 2, "head_dim": 16}, (4096, 2048)),
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "num_layers": 2}, (4096, 2048)),
    ],
)
def test_a_recurrence_is_counted_on_few_tokens(kind, fields, lengths):
    """The private function shows the lengths. 4,096 tokens would take a quarter of an hour."""
    model = built(section(kind, **fields)["config"], dropout=False)
    assert module._lengths(model, find_blocks(model), 4096, "bf16") == lengths


@pytest.mark.proof
def test_bytes_of_a_recurrence_are_those_of_all_tokens(monkeypatch):
    """Changes the private number of tokens, to count the same sequence in both ways."""
    config = section("recurrent_gemma")["config"]
    few = module._count_model(built(config, dropout=False), 96, "bf16", dropping=False)
    monkeypatch.setattr(module, "_RECURRENT_TOKENS", 96)
    full = module._count_model(built(config, dropout=False), 96, "bf16", dropping=False)
    assert few.none.linear == pytest.approx(full.none.linear + full.none.scores, rel=1e-3)
    working = full.working.linear + full.working.scores
    assert few.working.linear == pytest.approx(working, rel=0.03)


def test_notes_about_what_formulas_do_not_price():
    def notes(fields, device):
        return formula_notes(Request(model_of(fields), cluster(device, 1), 2, 64))

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    (note,) = notes({"model_type": "gptj", "rotary_dim": 16, **sizes, **dropout}, "h100")
    assert "gptj: its attention writes scores of " in note and "too low" in note
    assert notes({"model_type": "llama", **SIZES}, "h100") == []
    # Random numbers are slow on CPU cores.
    (note,) = notes({"model_type": "gpt2", **sizes}, "cpu")
    assert "gpt2 has dropout of hidden states" in note
