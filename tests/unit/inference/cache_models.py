"""Tiny models of families whose layers cache different parts of earlier tokens."""

from __future__ import annotations

from typing import Any

import torch

from tests.unit.model.families import family

WINDOW = {"sliding_window": 6}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LINEAR = {
    **EXPERTS,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "shared_expert_intermediate_size": 16,
}
MAMBA = {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
FIRST_FALCON = {"new_decoder_architecture": False, "num_kv_heads": None}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "qwen2": {**WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    "qwen3_next": LINEAR,
    "gemma2": WINDOW,
    "gpt_oss": {**WINDOW, "num_local_experts": 4},
    "gpt2": {},
    "falcon": FIRST_FALCON,
    "falcon, every head": {**FIRST_FALCON, "multi_query": False},
    "falcon, new": {"num_kv_heads": 2},
    "deepseek_v3": LATENT,
    "jamba": {**MAMBA, "use_mamba_kernels": False},
}
TWO_WIDTHS = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 64,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
PER_LAYER = {**TWO_WIDTHS, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 101}
FEWER_HEADS = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "global_head_dim": 32,
}
SHARED = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA4: dict[str, dict[str, Any]] = {
    "gemma4_text": PER_LAYER,
    "gemma4_text, fewer heads": {**PER_LAYER, **FEWER_HEADS},
    "gemma4_text, shared layers": {**PER_LAYER, **SHARED},
    "gemma4_unified_text": TWO_WIDTHS,
    "gemma4_unified": {"vision_config": None, "audio_config": None},
}
"""Models whose layers differ in the width or number of their heads."""


def model_of(name, device="cpu"):
    fields = (KINDS | GEMMA4)[name]
    if name == "gemma4_unified":
        text = model_of("gemma4_unified_text", "meta").config.to_dict()
        fields = {**fields, "text_config": text}
    else:
        # torch's grouped product needs even widths of experts.
        fields = {"num_hidden_layers": 4, "intermediate_size": 48, **fields}
    model = family(name.split(",")[0], device=device, **fields).float()
    model.generation_config.eos_token_id = None
    return model


def cache_tensors(cache):
    """Yield the tensors of all layers of a cache."""
    for layer in cache.layers:
        for value in vars(layer).values():
            candidates = value.values() if isinstance(value, dict) else [value]
            for candidate in candidates:
                if isinstance(candidate, torch.Tensor) and candidate.ndim:
                    yield candidate


def generated_cache_bytes(model, prompt_tokens, new_tokens):
    """Return the bytes of the cache after Transformers' `generate` of two requests.

    None if its `generate` does not return a cache.
    """
    ids = torch.arange(3, 3 + prompt_tokens).expand(2, -1)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    cache = output.past_key_values
    return None if cache is None else sum(tensor.nbytes for tensor in cache_tensors(cache))
