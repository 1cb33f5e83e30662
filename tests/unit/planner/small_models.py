"""Small models of several families, as the planner and as the engine see them."""

import torch

from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.model.plans import make_plan
from plait.planner.hardware import cluster
from plait.planner.models import Model, from_config
from plait.planner.request import Request

SMALL = {
    "llama": {"hidden_size": 96, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 211},
    "qwen2": {
        "hidden_size": 96,
        "intermediate_size": 176,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 211,
        "tie_word_embeddings": True,
    },
    "qwen3": {"hidden_size": 96, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 211, "head_dim": 16},
    "gpt2": {"n_embd": 96, "n_layer": 3, "n_head": 8, "n_inner": 200, "vocab_size": 211, "n_positions": 64},
}  # fmt: skip


def request_for(kind):
    """On eight H100."""
    fields = {"model_type": kind, **SMALL[kind]}
    return Request(Model(from_config(fields), {"config": fields}), cluster("h100", 8), 64, 32)


def real_facts(kind, tp):
    """Of the model itself, split by its plan."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **SMALL[kind])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    blocks = find_blocks(model, None)
    return model_facts(
        model, blocks, tensor_plan=make_plan(model, tp=tp, blocks=blocks) if tp > 1 else None
    )
