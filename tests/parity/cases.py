"""Small models and ragged data for parity tests. Imported by workers, so everything is a module-level function."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import plait

VOCABULARY = 101


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
    """A language model that knows nothing of Transformers. `side` in the batch switches the branch of every block on."""

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
    """Like a Transformers output: `logits` [batch, seq, vocab]."""

    def __init__(self, logits):
        self.logits = logits


def build(kind, *, tied, dtype=torch.float64, device="meta", layers=None):
    """A tiny model on `meta` (or another device)."""
    torch.manual_seed(7)
    with torch.device(device):
        if kind in ("plain", "frozen"):
            return PlainModel(tied=tied, frozen=kind == "frozen", layers=layers or 3).to(dtype)
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(
            transformers_config(kind, tied=tied, layers=layers)
        ).to(dtype)


def transformers_config(kind, *, tied, layers=None):
    """Configurations with widths and a vocabulary that 2, 3 and 4 do not all divide. Dropout is off."""
    from transformers import AutoConfig

    llama_like = {
        "hidden_size": 32,
        "intermediate_size": 53,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    wide = {**llama_like, "head_dim": 8}
    gpt2_like = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes: dict[str, dict[str, Any]] = {
        "llama": llama_like,
        "wide": {
            **llama_like,
            "hidden_size": 256,
            "intermediate_size": 384,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
        "mistral": {**llama_like, "sliding_window": None},
        "qwen2": llama_like,
        "qwen3": wide,
        "gemma": wide,
        "gemma2": {**wide, "sliding_window": 64},
        "gemma3_text": {
            **wide,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * ((layers or 2) // 2),
        },
        "phi3": {**llama_like, "pad_token_id": 0},
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **gpt2_like},
        "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **gpt2_like},
        "gptj": {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "rotary_dim": 4,
            **gpt2_like,
        },
        "gpt_neox": {
            "hidden_size": 32,
            "intermediate_size": 53,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "opt": {
            "hidden_size": 32,
            "ffn_dim": 53,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            "dropout": 0.0,
        },
        "bloom": {
            "hidden_size": 32,
            "n_layer": 2,
            "n_head": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "falcon": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "stablelm": {**llama_like, "hidden_dropout": 0.0},
    }
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    depth = (
        {}
        if layers is None
        else {"n_layer" if "n_layer" in sizes[kind] else "num_hidden_layers": layers}
    )
    model_type = "llama" if kind == "wide" else kind  # rows that states of 8 bits have blocks in
    return AutoConfig.for_model(
        model_type,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        **{**tokens, **sizes[kind], **depth},
    )


def ragged_steps(micro_batches, *, steps=2, size=2, keys=("attention_mask",)):
    """Steps of micro-batches of different lengths, right-padded rows, unequal target counts; the second micro-batch of the first step has
    no target at all."""
    generator = torch.Generator().manual_seed(1)
    plan = []
    for step in range(steps):
        pieces = []
        for index in range(micro_batches):
            length = int(torch.randint(5, 12, (1,), generator=generator))
            ids = torch.randint(0, VOCABULARY, (size, length), generator=generator)
            labels, mask = ids.clone(), torch.ones_like(ids)
            labels[0, length // 2 :] = -100
            mask[0, length // 2 :] = 0
            if index == 1 and step == 0:
                labels[:] = -100
            pieces.append(
                {
                    "input_ids": ids,
                    "labels": labels,
                    **({"attention_mask": mask} if "attention_mask" in keys else {}),
                }
            )
        plan.append(pieces)
    return plan


def engine(model, config, **more):
    """An engine that trains a causal language model."""
    return plait.initialize(model, config, loss_fn=plait.causal_lm_loss, **more)


def steps_for(kind, micro_batches, *, steps=2):
    """The data that a kind of model takes."""
    return ragged_steps(
        micro_batches, steps=steps, keys=() if kind in ("plain", "frozen") else ("attention_mask",)
    )


def sgd(parameters):
    """SGD with momentum, in plain torch."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    """The optimizer of `OPTIMIZER`, in plain torch."""
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)


OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1},
}
