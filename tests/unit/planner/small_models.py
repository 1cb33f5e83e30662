"""Small models of several families, as the planner and as the engine see them."""

import torch

from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.model.plans import make_plan
from plait.planner.hardware import cluster
from plait.planner.request import Request
from tests.unit.planner.jobs import model_of

LLAMA = {
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 211,
}
GPT2 = {
    "n_embd": 96,
    "n_layer": 3,
    "n_head": 8,
    "n_inner": 200,
    "vocab_size": 211,
    "n_positions": 64,
}
SMALL = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "tie_word_embeddings": True},
    "qwen3": {**LLAMA, "head_dim": 16},
    "gpt2": GPT2,
}


def request_for(kind):
    """Return a request for a plan on eight H100."""
    return Request(model_of({"model_type": kind, **SMALL[kind]}), cluster("h100", 8), 64, 32)


def real_facts(kind, tp):
    """Return the facts of the model that Transformers builds, split by the engine's plan."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **SMALL[kind])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    blocks = find_blocks(model, None)
    if tp == 1:
        return model_facts(model, blocks, tensor_plan=None)
    return model_facts(model, blocks, tensor_plan=make_plan(model, tp=tp, blocks=blocks))
