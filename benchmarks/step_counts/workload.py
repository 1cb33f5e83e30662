"""The model, the batches and the optimizer of every layout, the same for Plait and for plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LAYERS = 4
VOCABULARY = 256
TOKENS = 32
SAMPLES = 2
"""Samples per micro-batch."""
MAX_NORM = 1.0
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


def build_model() -> nn.Module:
    """Build a small float32 Llama of Transformers on the CPU, in training mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def batch(rows: int, *, seed: int) -> dict[str, Tensor]:
    """Return `input_ids` and `labels` [rows, TOKENS] int64, in host memory."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (rows, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}
