"""A Llama block split by Plait, and the same block split by hand with torch's parallel styles."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import plait

RANKS = 2
LENGTH = 8
WIDTH = 32


def by_plait(*, sequence):
    """Split through a configuration."""
    model = llama("meta")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "parallel": {"tp": RANKS, "sequence_parallel": sequence},
    }
    engine = plait.initialize(model, config)
    region = engine.parts.region
    assert region is not None
    region.length = LENGTH  # the input of the first block sets it; here a block runs alone
    # The gather in front of the first block belongs to the model, not to the block.
    model.model.layers[0]._forward_pre_hooks.clear()
    return model


def llama(device):
    """Build a model whose widths are even, because torch's styles cannot split others."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            LlamaConfig(hidden_size=WIDTH, intermediate_size=64, **sizes)
        )


def by_hand(*, sequence):
    """Split one decoder layer as torch's tutorials do."""
    model = llama("cpu")
    hidden = "hidden_states"
    shards = Shard(1) if sequence else Replicate()
    gathers = PrepareModuleInput(
        input_kwarg_layouts={hidden: shards}, desired_input_kwarg_layouts={hidden: Replicate()}
    )
    plan: dict[str, Any] = {
        "self_attn": gathers,
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=shards),
        "mlp": PrepareModuleInput(input_layouts=(shards,), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=shards),
    }
    if sequence:
        plan |= {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
        }
    parallelize_module(model.model.layers[0], init_device_mesh("cpu", (RANKS,)), plan)
    return model


def step(model, *, sequence):
    """Run forward and backward of the first block. Gradients are complete sums afterwards."""
    block = model.model.layers[0]
    hidden = torch.ones(2, LENGTH // RANKS if sequence else LENGTH, WIDTH, requires_grad=True)
    positions = model.model.rotary_emb(torch.ones(2, LENGTH, WIDTH), torch.arange(LENGTH)[None])
    block(hidden, position_embeddings=positions).sum().backward()
    for parameter in block.parameters():
        # torch leaves the gradients of norms as partial sums that their readers reduce.
        if isinstance(parameter.grad, DTensor):
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
