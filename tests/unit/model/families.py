"""Tiny models of Transformers' families by name, with random float64 weights and no dropout.

The tested degrees do not divide their widths.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.unit.model.simulate import randomise

VOCABULARY = 101
TOKENS = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
"""[batch, seq]: a sequence that no tested degree divides."""

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 53,
    "vocab_size": VOCABULARY,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DROPOUTS = [
    "attention_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "dropout",
    "activation_dropout",
    "resid_dropout",
    "embed_dropout",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
]
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
_SPECIAL: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 53, "word_embed_proj_dim": 32},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mpt": {"n_heads": 4, "d_model": 32, "n_layers": 2, "max_seq_len": 64},
    "falcon": {"head_dim": None, "num_kv_heads": 4, "new_decoder_architecture": True},
    "mixtral": {"num_local_experts": 2},
    "deepseek_v2": {**_LATENT, "v_head_dim": 8},
}


def family(kind, *, device="cpu", **changes):
    """Return a causal language model of a type. `changes` are fields of its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    defaults = AutoConfig.for_model(kind)
    known = {*defaults.to_dict(), *defaults.attribute_map}
    general = {**SMALL, **dict.fromkeys(_DROPOUTS, 0.0)}
    fields = {name: value for name, value in general.items() if name in known}
    fields |= _SPECIAL.get(kind, {}) | changes
    config = AutoConfig.for_model(
        kind, **{name: value for name, value in fields.items() if value is not None}
    )
    config._attn_implementation = "eager"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config).double()
    return model if device == "meta" else randomise(model)


def logits(model):
    """Return the logits of TOKENS, [batch, seq, vocab]."""
    return model(input_ids=TOKENS, use_cache=False).logits
