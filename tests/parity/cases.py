"""Small models, ragged data and configurations that the parity tests share.

Worker processes import this file, so everything in it is a function or a class of the module.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import plait

VOCABULARY = 101

_LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_LLAMA_WITH_HEAD_DIM: dict[str, Any] = {**_LLAMA, "head_dim": 8}
_GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_SIZES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    # A Llama with rows that are long enough for the blocks of 8-bit optimizer states.
    "wide": {
        **_LLAMA,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "mistral": {**_LLAMA, "sliding_window": None},
    "qwen2": _LLAMA,
    "qwen3": _LLAMA_WITH_HEAD_DIM,
    "gemma": _LLAMA_WITH_HEAD_DIM,
    "gemma2": {**_LLAMA_WITH_HEAD_DIM, "sliding_window": 64},
    "gemma3_text": {**_LLAMA_WITH_HEAD_DIM, "sliding_window": 64},
    "phi3": {**_LLAMA, "pad_token_id": 0},
    "gpt2": _GPT2,
    "openai-gpt": _GPT2,
    "gptj": {**_GPT2, "rotary_dim": 4},
    "gpt_neox": {
        "hidden_size": 32,
        "intermediate_size": 53,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        **_NO_DROPOUT,
    },
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 53,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
        "dropout": 0.0,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, **_NO_DROPOUT},
    "falcon": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        **_NO_DROPOUT,
    },
    "stablelm": {**_LLAMA, **_NO_DROPOUT},
}
"""Sizes that 2, 3 and 4 do not all divide, without dropout, by the kind of model."""

OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1},
}


class Block(nn.Module):
    """A residual MLP block with an optional second branch that a batch may leave unused."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.side = nn.Linear(width, width)

    def forward(self, hidden, use_side):
        inner = self.down(F.gelu(self.up(self.norm(hidden))))
        return hidden + inner + (self.side(hidden) if use_side else 0)


class PlainModel(nn.Module):
    """A language model outside of Transformers.

    `side` in the batch switches the second branch of every block on.
    """

    def __init__(self, *, tied, width=12, frozen=False, layers=3):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.blocks[1].up.requires_grad_(False)

    def forward(self, input_ids, side=False):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden, side)
        return Output(self.head(hidden))


class Output:
    """Stand-in for a Transformers output, with `logits` [batch, tokens, vocabulary]."""

    def __init__(self, logits):
        self.logits = logits


def build(kind, *, tied, dtype=torch.float64, device="meta", layers=None):
    """Build a tiny model on `meta` or another device."""
    torch.manual_seed(7)
    with torch.device(device):
        if kind in ("plain", "frozen"):
            return PlainModel(tied=tied, frozen=kind == "frozen", layers=layers or 3).to(dtype)

        from transformers import AutoModelForCausalLM

        config = transformers_config(kind, tied=tied, layers=layers)
        return AutoModelForCausalLM.from_config(config).to(dtype)


def transformers_config(kind, *, tied, layers=None):
    """Return the configuration of a tiny Transformers model."""
    from transformers import AutoConfig

    fields = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, **_SIZES[kind]}
    if layers is not None:
        fields["n_layer" if "n_layer" in fields else "num_hidden_layers"] = layers
    if kind == "gemma3_text":
        attention = ["sliding_attention", "full_attention"]
        fields["layer_types"] = attention * ((layers or 2) // 2)
    return AutoConfig.for_model(
        "llama" if kind == "wide" else kind,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        **fields,
    )


def ragged_steps(micro_batches, *, steps=2, size=2, keys=("attention_mask",)):
    """Return steps of micro-batches with different lengths and numbers of targets.

    Rows are padded on the right. The second micro-batch of the first step has no target at all.
    """
    generator = torch.Generator().manual_seed(1)
    result = []
    for step in range(steps):
        batches = []
        for index in range(micro_batches):
            length = int(torch.randint(5, 12, (1,), generator=generator))
            ids = torch.randint(0, VOCABULARY, (size, length), generator=generator)
            labels = ids.clone()
            labels[0, length // 2 :] = -100
            if index == 1 and step == 0:
                labels[:] = -100

            batch = {"input_ids": ids, "labels": labels}
            if "attention_mask" in keys:
                batch["attention_mask"] = torch.ones_like(ids)
                batch["attention_mask"][0, length // 2 :] = 0
            batches.append(batch)
        result.append(batches)
    return result


def engine(model, config, **arguments):
    """Return an engine that trains a causal language model."""
    return plait.initialize(model, config, loss_fn=plait.causal_lm_loss, **arguments)


def steps_for(kind, micro_batches, *, steps=2):
    """Return ragged steps with the inputs that a kind of model takes."""
    keys = () if kind in ("plain", "frozen") else ("attention_mask",)
    return ragged_steps(micro_batches, steps=steps, keys=keys)


def sgd(parameters):
    """Return torch's SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    """Return the optimizer of `OPTIMIZER` as torch implements it."""
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
