"""What a count of blocks says, and what is told where there is none."""

import pytest

from plait.model.blocks import find_blocks
from plait.planner import built as module
from plait.planner.built import built, counted, not_counted
from plait.planner.hardware import cluster
from plait.planner.models import Model, from_config
from plait.planner.request import Request, formula_notes

pytest.importorskip("transformers")
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 96}  # fmt: skip
ASKED = {"sequence": 24, "precision": "bf16", "on_cores": False}


def section(kind, **more):
    return {"config": {"model_type": kind, **SIZES, **more}}


def test_code_that_looks_at_values_is_not_counted_and_told():
    sizes = {"num_experts_per_tok": 1, "num_key_value_heads": 2, "kv_channels": 16}
    given = section("jetmoe", num_local_experts=2, **sizes)
    assert counted(given, "jetmoe", **ASKED) is None
    note = not_counted(given, "jetmoe", compiled=False, **ASKED)
    words = "jetmoe: the bytes that its blocks keep for the backward are computed by a formula"
    assert words in note
    assert "(its blocks do not run without data), which may be too low" in note


def test_what_no_count_is_made_of_is_told(monkeypatch):
    given = section("gemma2", num_key_value_heads=2, head_dim=16)
    assert not_counted(given, "gemma2", compiled=False, **ASKED) is None
    note = not_counted(given, "gemma2", compiled=True, **ASKED)
    words = "(blocks are compiled), which leaves out more than a third of what they keep"
    assert words in note
    # Formulas cover this family.
    assert not_counted(section("llama"), "llama", compiled=True, **ASKED) is None
    assert counted({"path": "no/such/folder"}, "gemma2", **ASKED) is None
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert counted(given, "gemma2", **ASKED) is None
    note = not_counted(given, "gemma2", compiled=False, **ASKED)
    assert "(Transformers is not installed)" in note


def test_a_dropout_of_scores_in_memory_is_counted_for_gpus_too():
    """A GPU keeps a mask of one byte. On CPU cores the mask is as wide as the result."""
    kind = "gpt_neox_japanese"
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.1}
    given = section(kind, intermediate_multiple_size=2, **dropout)
    gpu, cores = (counted(given, kind, **{**ASKED, "on_cores": here}) for here in (False, True))
    scores = SIZES["num_attention_heads"] * ASKED["sequence"]
    assert not gpu.dropping and gpu.none.scores and gpu.dropped_scores == pytest.approx(3 * scores)
    assert cores.dropping and not cores.dropped_scores
    assert cores.none.scores - gpu.none.scores == pytest.approx(4 * scores)


@pytest.mark.parametrize(
    ("kind", "more", "lengths"),
    [
        ("jamba", {"num_experts": 2, "num_key_value_heads": 2}, (32, 16)),
        ("recurrent_gemma", {}, (32, 16)),
        ("gemma2", {"num_key_value_heads": 2, "head_dim": 16}, (4096, 2048)),
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "num_layers": 2}, (4096, 2048)),
    ],
)  # fmt: skip
def test_a_recurrence_by_token_is_counted_on_a_few_tokens(kind, more, lengths):
    """Counting 4,096 tokens would take a quarter of an hour."""
    model = built(section(kind, **more)["config"], dropout=False)
    assert module._lengths(model, find_blocks(model), 4096, "bf16") == lengths


@pytest.mark.proof
def test_bytes_of_a_recurrence_are_those_of_a_longer_sequence(monkeypatch):
    config = section("recurrent_gemma")["config"]
    few = module._count_model(built(config, dropout=False), 96, "bf16", dropping=False)
    monkeypatch.setattr(module, "_RECURRENT_TOKENS", 96)
    found = module._count_model(built(config, dropout=False), 96, "bf16", dropping=False)
    assert few.none.linear == pytest.approx(found.none.linear + found.none.scores, rel=1e-3)
    working = found.working.linear + found.working.scores
    assert few.working.linear == pytest.approx(working, rel=0.03)


def test_what_formulas_do_not_price_is_told():
    """The note names scores in memory and random numbers of cores. A family that is priced as it runs has no note."""

    def notes(fields, device):
        model = Model(from_config(fields), {"config": fields})
        return formula_notes(Request(model, cluster(device, 1), 2, 64))

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    (scores,) = notes({"model_type": "gptj", "rotary_dim": 16, **sizes, **dropout}, "h100")
    assert "gptj: its attention writes scores of " in scores and "too low" in scores
    assert notes({"model_type": "llama", **SIZES}, "h100") == []
    (drops,) = notes({"model_type": "gpt2", **sizes}, "cpu")
    assert "gpt2 has dropout of hidden states" in drops
