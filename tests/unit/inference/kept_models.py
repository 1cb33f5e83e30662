"""Tiny models of families whose layers keep different things of earlier tokens."""

from __future__ import annotations

from typing import Any

import torch

WIDTHS: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
GROUPED = {**WIDTHS, "num_key_value_heads": 2, "head_dim": 8}
WINDOW = {**GROUPED, "sliding_window": 6}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **WIDTHS,
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
    **GROUPED,
    **EXPERTS,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "shared_expert_intermediate_size": 16,
}
GPT2 = {"vocab_size": 40, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "eos_token_id": None}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GROUPED),
    "mistral": ("mistral", WINDOW),
    "mistral, no window": ("mistral", {**GROUPED, "sliding_window": None}),
    "mixtral": ("mixtral", {**GROUPED, "sliding_window": None, "num_local_experts": 4}),
    "qwen2": ("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 2}),
    "qwen3": ("qwen3", GROUPED),
    "qwen3_next": ("qwen3_next", LINEAR),
    "gemma2": ("gemma2", WINDOW),
    "gemma3_text": ("gemma3_text", WINDOW),
    "gpt_oss": ("gpt_oss", {**WINDOW, "num_local_experts": 4}),
    "gpt2": ("gpt2", GPT2),
    "falcon": ("falcon", WIDTHS),
    "falcon, every head": ("falcon", {**WIDTHS, "multi_query": False}),
    "falcon, new": ("falcon", {**WIDTHS, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "deepseek_v2": ("deepseek_v2", {**LATENT, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "jamba": ("jamba", {**GROUPED, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}),
    "jetmoe": ("jetmoe", {**GROUPED, "kv_channels": 8, "num_local_experts": 4}),
}  # fmt: skip


def model_of(name, device="cpu"):
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields = KINDS[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields)).eval()
    model.generation_config.eos_token_id = None
    return model


def tensors(cache):
    """That a cache keeps, each once."""
    for layer in cache.layers:
        for value in vars(layer).values():
            several = value.values() if isinstance(value, dict) else [value]
            yield from (one for one in several if isinstance(one, torch.Tensor) and one.ndim)
