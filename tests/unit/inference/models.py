"""Tiny models of random weights, as Transformers builds and saves them."""

from __future__ import annotations

from typing import Any

import torch


def built(kind="llama", *, layers=3, **fields):
    """With weights, in evaluation mode; widths are multiples of the group of int4."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        shape: dict[str, Any] = {"n_embd": 64, "n_layer": layers, "n_head": 4, "n_positions": 128}
    else:
        shape = {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 128,
        }  # fmt: skip
    config = AutoConfig.for_model(
        kind,
        vocab_size=96,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=None,
        **{**shape, **fields},
    )
    return AutoModelForCausalLM.from_config(config).eval()


def saved(folder, kind="llama", **fields):
    """The same, in a folder of `save_pretrained`."""
    model = built(kind, **fields)
    model.save_pretrained(folder)  # type: ignore[operator]
    return model
