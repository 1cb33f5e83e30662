"""Families are split in the planner as the engine splits small models of them."""

import pytest

from plait.model.blocks import find_blocks
from plait.model.plans import make_plan
from plait.planner.models import from_config, named
from plait.planner.techniques import SPLIT, WHOLE_ATTENTION, split_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 101,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
}
"""Fields of all families. Each configuration gets those that it has."""
OTHER_FIELDS = {
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "mpt": {"n_heads": 4, "d_model": 32, "n_layers": 2, "vocab_size": 101, "max_seq_len": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
}


def build(kind, **changes):
    """Return a small model of a family, and the fields of its configuration."""
    defaults = transformers.AutoConfig.for_model(kind)
    fields = {name: value for name, value in SMALL.items() if hasattr(defaults, name)}
    fields |= {**OTHER_FIELDS.get(kind, {}), **changes}
    config = transformers.AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model, {"model_type": kind, **fields}


@pytest.mark.parametrize("kind", SPLIT)
def test_as_the_engine_splits_it(kind):
    model, fields = build(kind)
    split = split_of(from_config(fields))
    plan = make_plan(model, tp=2, blocks=find_blocks(model, None))
    assert split.tensor is None
    assert (split.sequence is None) == (plan.sequence_parallel is True)
    gathered = any(entry.style == "colwise_gather_output" for entry in plan.modules)
    assert split.replicates_attention == gathered == (kind in WHOLE_ATTENTION)


def test_without_dropout_gpt2_shards_its_sequence():
    changes = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model, fields = build("gpt2", **changes)
    assert make_plan(model, tp=2, blocks=find_blocks(model, None)).sequence_parallel is True
    assert split_of(from_config(fields)).sequence is None


def test_unknown_models_are_not_split():
    assert split_of(named("mixtral-8x7b")).with_experts
    assert "does not split attention of deepseek_v3" in split_of(named("deepseek-v3")).tensor
    split = split_of(from_config({"model_type": "stranger", **SMALL}))
    assert "not among the families whose sequences can be split" in split.context
    assert "does not know how to split stranger" in split.tensor
