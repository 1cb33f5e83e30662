"""Tiny models whose layers keep a state that every token changes, or a cache of their own."""

from __future__ import annotations

from typing import Any

from tests.unit.inference.models import transformers_tokens
from tests.unit.model.families import family

PROMPTS = [[5, 17, 33, 2, 90, 41, 7, 11, 64], [8, 3], [71, 12, 12, 12, 93]]
NEW = 8
JAMBA_LAYERS = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 4}
FIELDS: dict[str, dict[str, Any]] = {
    "jamba": {**JAMBA_LAYERS, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64, "mamba_d_state": 8},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 8},
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 2,
        "block_size": 4,
    },
}


def built(kind):
    # torch's grouped product needs even widths of experts.
    fields = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, **FIELDS[kind]}
    model = family(kind, **fields).float()
    model.generation_config.eos_token_id = None
    return model


def by_transformers(model):
    """Return the new tokens of each prompt, generated alone."""
    return [transformers_tokens(model, prompt, NEW) for prompt in PROMPTS]
