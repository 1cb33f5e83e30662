"""Tiny models whose layers keep a state that every token changes, or a cache of their own."""

from __future__ import annotations

from typing import Any

import torch

from tests.unit.inference.models import transformers_tokens

PROMPTS = [[5, 17, 33, 2, 90, 41, 7, 11, 64], [8, 3], [71, 12, 12, 12, 93]]
NEW = 8
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": None,
}
FIELDS: dict[str, dict[str, Any]] = {
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 4,
    },
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "lru_width": 64,
        "attention_window_size": 8,
        "head_dim": 16,
    },
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 2,
        "block_size": 4,
        "head_dim": 16,
    },
}


def built(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **{**SHAPE, **FIELDS[kind]})
    return AutoModelForCausalLM.from_config(config).eval()


def by_transformers(model):
    """Return the new tokens of each prompt, generated alone."""
    return [transformers_tokens(model, prompt, NEW) for prompt in PROMPTS]
