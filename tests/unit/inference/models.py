"""Tiny models of random weights, as Transformers builds and saves them, and its greedy tokens."""

from __future__ import annotations

from typing import Any

import torch


def built(kind="llama", *, layers=3, **fields):
    """Return a model with weights in evaluation mode.

    Its widths are multiples of the group size of int4 quantisation.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    if kind == "gpt2":
        shape = {"n_embd": 64, "n_layer": layers, "n_head": 4, "n_positions": 128}
    tokens = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": None}
    config = AutoConfig.for_model(kind, **tokens, **{"initializer_range": 0.3, **shape, **fields})
    return AutoModelForCausalLM.from_config(config).eval()


def saved(folder, kind="llama", **fields):
    """Save such a model with `save_pretrained`, and return it."""
    model = built(kind, **fields)
    model.save_pretrained(folder)  # type: ignore[operator]
    return model


def transformers_tokens(model, prompt, new_tokens, **settings):
    """Return the greedy tokens that Transformers' `generate` adds to one prompt."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    greedy = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    output = model.generate(ids, attention_mask=mask, **greedy, **settings)
    return output[0, len(prompt) :].tolist()
