"""Memory and positions that a generation needs, checked before its first token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait._torch.units import sharded_modules, sharded_parameters
from plait.cluster.host_memory import free_host_bytes
from plait.errors import InputError
from plait.model.layer_sizes import largest_of_layers
from plait.units import format_bytes

USABLE_SHARE = 0.8
"""Share of the free memory that gathered parameters may take.

Activations and the allocator need the rest.
"""


def activation_bytes(config: Any, *, tokens: int, requests: int, itemsize: int) -> int:
    """Return the size of the activations of one forward.

    They are the widest tensors of a block (hidden states, three of the MLP's, queries, keys and
    values), a mask, and the logits of the last position in float32 with the temporary tensors of
    sampling.

    Args:
        config: Configuration of the model, or None.
        tokens: Number of tokens of all requests.
        requests: Number of requests.
        itemsize: Size of an element in bytes.
    """
    if config is None:
        return 0
    config = config.get_text_config(decoder=True)
    hidden = getattr(config, "hidden_size", 0)
    inner = largest_of_layers(config, "intermediate_size") or 4 * hidden
    vocabulary = getattr(config, "vocab_size", 0)
    longest = -(-tokens // max(requests, 1))

    block = tokens * (6 * hidden + 3 * inner) * itemsize
    # 2 bytes per element of the mask [requests, longest, longest].
    mask = requests * longest * longest * 2
    # The logits, and three tensors of their size in float32.
    logits = requests * vocabulary * (itemsize + 3 * 4)
    return block + mask + logits


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point weight, which the model computes in."""
    return next(
        parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()
    )


def gathered_bytes(model: nn.Module, compute: torch.dtype | None) -> int:
    """Return the size of all parameters that a sharded model gathers.

    Args:
        model: The sharded model.
        compute: Dtype that it computes in. None stands for the parameters' own dtypes.
    """
    total = 0
    for unit in sharded_modules(model):
        for entry in sharded_parameters(unit):
            parameter = entry.sharded_param
            total += parameter.numel() * (compute or parameter.dtype).itemsize
    return total


def free_bytes(device: torch.device, ranks_here: int) -> int | None:
    """Return the memory that is free for tensors of this rank, or None if it is unknown.

    Args:
        device: The rank's device.
        ranks_here: Number of ranks that share the memory of the CPU.
    """
    if device.type == "cpu":
        free_on_host = free_host_bytes()
        return None if free_on_host is None else free_on_host // ranks_here
    free, _ = torch.accelerator.get_memory_info(device)
    # The allocator reuses memory that it has reserved and not allocated.
    reserved = torch.accelerator.memory_reserved(device)
    unused = reserved - torch.accelerator.memory_allocated(device)
    return int(free + unused)


def check_cache(
    needed: int, free: int | None, requests: int, tokens: int, *, where: str = "on this rank"
) -> None:
    """Raise InputError if keys and values do not fit into memory.

    Args:
        needed: Size of the keys and values in bytes.
        free: Size of the free memory in bytes. None if it is unknown, which raises nothing.
        requests: Number of requests, for the message.
        tokens: Length of the longest request, for the message.
        where: Place of the memory, for the message.
    """
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
    """Raise InputError if a request may get longer than the model's positions.

    Args:
        config: Configuration of the model, or None.
        longest: Number of tokens of the longest request.
        of: What that number consists of, for the message.
        remedy: Remedy, for the message.
    """
    if config is None:
        return
    config = config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    # Dynamic frequencies follow the length of the input.
    grows = any("dynamic" in str(kind) for kind in _rope_types(rope))
    if isinstance(positions, int) and longest > positions and not grows:
        raise InputError(
            f"the longest request may have {longest:,} tokens ({of}), and the model's positions end"
            f" at {positions:,} (max_position_embeddings); {remedy}"
        )


def _rope_types(rope: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the RoPE types of a model, or of each type of its layers."""
    yield rope.get("rope_type")
    for value in rope.values():
        if isinstance(value, dict):
            yield value.get("rope_type")


def is_sharded(model: nn.Module) -> bool:
    """Return True if a forward of a model gathers parameters."""
    return isinstance(model, FSDPModule)
