"""Digests of all bits of a run, for techniques that may change none, and models with dropout."""

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
    """Build a tiny model with tied weights on `meta`."""
    from transformers import AutoModelForCausalLM

    config = cases.transformers_config(kind, tied=True, layers=layers)
    if dropout:
        for name, probability in DROPOUT[kind].items():
            setattr(config, name, probability)
    # Recomputed blocks drop the cache. Keys and values that went through it have other strides,
    # so their products would have other bits.
    config.use_cache = False
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).to(dtype)


def digest(trace):
    """Return a hash of all numbers of a trace."""
    numbers = (trace.losses, trace.grad_norms, trace.scales)
    result = hashlib.blake2b(repr(numbers).encode())
    for tensors in (*trace.gradients, trace.parameters):
        for name, tensor in sorted(tensors.items()):
            result.update(name.encode())
            if tensor is not None:
                result.update(_bytes_of(tensor))
    return result.hexdigest()


def digest_of(engine):
    """Return a hash of the parameters and optimizer states of this rank."""
    result = hashlib.blake2b()
    for parameter in engine.model.parameters():
        for value in (parameter, *engine.optimizer.state.get(parameter, {}).values()):
            if isinstance(value, torch.Tensor):
                result.update(_bytes_of(local_tensor(value.detach())))
    return result.hexdigest()


def _bytes_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
