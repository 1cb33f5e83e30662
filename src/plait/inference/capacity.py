"""What a generation needs of memory, asked before its first token."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait._torch.units import sharded_modules, sharded_parameters
from plait.cluster.host_memory import free_host_bytes
from plait.errors import InputError
from plait.model.layer_sizes import largest_of_layers
from plait.units import format_bytes

ROOM = 0.8
"""The part of the free memory that full parameters may take: activations and the allocator need
some.
"""


def activation_bytes(config: Any, *, tokens: int, requests: int, itemsize: int) -> int:
    """Of one forward over `tokens` tokens of all requests together: a block's widest tensors
    (hidden states, three of the MLP's, queries, keys and values), a mask, and logits of the last
    position in float32 with what a choice makes of them.
    """
    if config is None:
        return 0
    config = config.get_text_config(decoder=True)
    hidden = getattr(config, "hidden_size", 0)
    inner = largest_of_layers(config, "intermediate_size") or 4 * hidden
    vocabulary = getattr(config, "vocab_size", 0)
    longest = -(-tokens // max(requests, 1))
    return (
        tokens * (6 * hidden + 3 * inner) * itemsize
        + requests * longest * longest * 2
        + requests * vocabulary * (itemsize + 3 * 4)
    )


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point weight, which the model computes in."""
    return next(
        parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()
    )


def gathered_bytes(model: nn.Module, compute: torch.dtype | None) -> int:
    """All parameters that the model's units gather, in the dtype that they compute in; None is
    their own.
    """
    held = [
        one.sharded_param for unit in sharded_modules(model) for one in sharded_parameters(unit)
    ]
    return sum(parameter.numel() * (compute or parameter.dtype).itemsize for parameter in held)


def free_bytes(device: torch.device, ranks_here: int) -> int | None:
    """Memory for tensors of this rank: free on its device, or its share of the host's; None where
    that is not known.
    """
    if device.type == "cpu":
        found = free_host_bytes()
        return None if found is None else found // ranks_here
    free, _ = torch.accelerator.get_memory_info(device)
    reserved = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(
        device
    )
    return int(free + reserved)


def check_cache(
    needed: int, free: int | None, requests: int, tokens: int, *, where: str = "on this rank"
) -> None:
    """Raise InputError where keys and values do not fit."""
    if free is not None and needed > free:
        raise InputError(
            f"keys and values of {requests} requests of up to {tokens:,} tokens take"
            f" {format_bytes(needed)} {where}, and {format_bytes(free)} are free; ask for fewer new"
            " tokens (max_new_tokens), or fewer requests at once (batch_size)"
        )


def check_positions(
    config: Any,
    longest: int,
    *,
    of: str = "its prompt and max_new_tokens",
    remedy: str = "ask for fewer new tokens, or shorten the prompt",
) -> None:
    """Raise InputError where a request may get longer than the positions that the model knows.
    `of`: what its length is made of.
    """
    if config is None:
        return
    config = config.get_text_config(decoder=True)
    known = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    grows = any(
        "dynamic" in str(kind)
        for kind in (
            rope.get("rope_type"),
            *(v.get("rope_type") for v in rope.values() if isinstance(v, dict)),
        )
    )
    if isinstance(known, int) and longest > known and not grows:
        raise InputError(
            f"the longest request may have {longest:,} tokens ({of}), and the model's positions end"
            f" at {known:,} (max_position_embeddings); {remedy}"
        )


def is_sharded(model: nn.Module) -> bool:
    """Whether a forward gathers parameters."""
    return isinstance(model, FSDPModule)
