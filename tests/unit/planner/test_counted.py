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
    given = section(
        "jetmoe", num_local_experts=2, num_experts_per_tok=1, num_key_value_heads=2, kv_channels=16
    )
    assert counted(given, "jetmoe", **ASKED) is None
    told = not_counted(given, "jetmoe", compiled=False, **ASKED)
    assert (
        told is not None
        and "jetmoe: the bytes that its blocks keep for the backward are computed by a formula"
        in told
    )
    assert "(its blocks do not run without data), which may be too low" in told


def test_what_no_count_is_made_of_is_told(monkeypatch):
    given = section("gemma2", num_key_value_heads=2, head_dim=16)
    assert not_counted(given, "gemma2", compiled=False, **ASKED) is None
    told = not_counted(given, "gemma2", compiled=True, **ASKED)
    assert (
        told is not None
        and "(blocks are compiled), which leaves out more than a third of what they keep" in told
    )
    assert (
        not_counted(section("llama"), "llama", compiled=True, **ASKED) is None
    )  # which formulas know
    assert counted({"path": "no/such/folder"}, "gemma2", **ASKED) is None
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert counted(given, "gemma2", **ASKED) is None
    assert "(Transformers is not installed)" in str(
        not_counted(given, "gemma2", compiled=False, **ASKED)
    )


def test_a_dropout_of_scores_in_memory_is_counted_for_gpus_too():
    """With a mask of a byte; on CPU cores it is as wide as the result."""
    given = section(
        "gpt_neox_japanese", hidden_dropout=0.0, attention_dropout=0.1, intermediate_multiple_size=2
    )
    gpu, cores = (
        counted(given, "gpt_neox_japanese", **{**ASKED, "on_cores": here}) for here in (False, True)
    )
    assert gpu is not None and cores is not None
    scores = SIZES["num_attention_heads"] * ASKED["sequence"]
    assert not gpu.dropping and gpu.none.scores and gpu.dropped_scores == pytest.approx(3 * scores)
    assert (
        cores.dropping
        and not cores.dropped_scores
        and cores.none.scores - gpu.none.scores == pytest.approx(4 * scores)
    )


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
    """Of 4,096 tokens it would take a quarter of an hour."""
    model = built(section(kind, **more)["config"], dropout=False)
    assert module._lengths(model, find_blocks(model), 4096, "bf16") == lengths


@pytest.mark.proof
def test_bytes_of_a_recurrence_are_those_of_a_longer_sequence(monkeypatch):
    config = section("recurrent_gemma")["config"]
    few = module._count_model(built(config, dropout=False), 96, "bf16", dropping=False)
    monkeypatch.setattr(module, "_RECURRENT_TOKENS", 96)
    found = module._count_model(built(config, dropout=False), 96, "bf16", dropping=False)
    assert few.none.linear == pytest.approx(found.none.linear + found.none.scores, rel=1e-3)
    assert few.working.linear == pytest.approx(
        found.working.linear + found.working.scores, rel=0.03
    )


def test_what_formulas_do_not_price_is_told():
    """Scores in memory, and random numbers of cores; nothing of a family that is priced as it runs."""

    def told(fields, device):
        return formula_notes(
            Request(Model(from_config(fields), {"config": fields}), cluster(device, 1), 2, 64)
        )

    gptj = {
        "model_type": "gptj",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 100,
        "n_positions": 64,
        "rotary_dim": 16,
    }
    (scores,) = told(gptj | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "h100")
    assert "gptj: its attention writes scores of " in scores and "too low" in scores
    assert told({"model_type": "llama", **SIZES}, "h100") == []
    (drops,) = told(
        {
            "model_type": "gpt2",
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 100,
            "n_positions": 64,
        },
        "cpu",
    )
    assert "gpt2 has dropout of hidden states" in drops
