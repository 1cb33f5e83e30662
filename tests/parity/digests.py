"""All bits of a run as one string, for tests of techniques that may change none; models with dropout."""

from __future__ import annotations

import hashlib

import torch

from plait._torch.tensors import local_tensor
from tests.parity import cases

DROPOUT: dict[str, dict[str, float]] = {
    "llama": {"attention_dropout": 0.2},
    "qwen3": {"attention_dropout": 0.2},
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.2},
}


def build(kind, dtype, *, dropout, layers=None):
    """On meta."""
    from transformers import AutoModelForCausalLM

    config = cases.transformers_config(kind, tied=True, layers=layers)
    for name, value in (DROPOUT[kind] if dropout else {}).items():
        setattr(config, name, value)
    config.use_cache = False  # recomputed blocks drop the cache, through which keys and values get other strides and their products other bits
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).to(dtype)


def digest(trace):
    """All bits of a run."""
    seen = hashlib.blake2b(repr((trace.losses, trace.grad_norms, trace.scales)).encode())
    for tensors in (*trace.gradients, trace.parameters):
        for name, tensor in sorted(tensors.items()):
            seen.update(
                name.encode()
                + (
                    b""
                    if tensor is None
                    else tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                )
            )
    return seen.hexdigest()


def digest_of(engine):
    """Parameters and states of this rank."""
    seen = hashlib.blake2b()
    for parameter in engine.model.parameters():
        for value in (parameter, *(engine.optimizer.state.get(parameter, {}).values())):
            if isinstance(value, torch.Tensor):
                seen.update(
                    local_tensor(value.detach())
                    .contiguous()
                    .reshape(-1)
                    .view(torch.uint8)
                    .numpy()
                    .tobytes()
                )
    return seen.hexdigest()
