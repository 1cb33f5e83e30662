"""The files that a configuration asks for, made for a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from plait._torch.units import shard_buffers, sharded_modules
from plait.config.resolving.resolve import Resolved
from plait.errors import ConfigError, Problem
from plait.optim.disk_optimizer import DiskTier
from plait.optim.optimizer import build_optimizer
from plait.parallel.offload.arena import Arena
from plait.parallel.offload.parameter_offload import ParameterOffload
from plait.units import format_bytes


def build_disk_tier(
    resolved: Resolved, model: nn.Module, units: Collection[str]
) -> DiskTier | None:
    """Files for `model`, which is sharded and may not have its weights yet: for states of these
    units (by their paths; "": all of it).
    """
    states = resolved.optimizer_offload
    parameters = resolved.parameter_offload
    if states.device != "nvme" and parameters.device != "nvme":
        return None
    arena = Arena(Path(states.path or ".")) if states.device == "nvme" else None
    shards = None
    if parameters.device == "nvme":
        _refuse_small_pool(parameters, model)
        same = arena is not None and parameters.path == states.path
        shards = (
            arena
            if same
            else Arena(
                Path(parameters.path or "."), field="zero_optimization.offload_param.nvme_path"
            )
        )
    walk = states if arena is not None else parameters
    tier = DiskTier(
        arena,
        buffer_bytes=walk.buffer_bytes,
        buffer_count=walk.buffer_count,
        shards=shards,
        pool_bytes=parameters.pool_bytes,
    )
    held = large_states(lambda named: build_optimizer(resolved.optimizer, named))
    tier.adopt(
        model, states=held, units=units, shards_of=units if parameters.with_states else ("",)
    )
    return tier


def _refuse_small_pool(offload: ParameterOffload, model: nn.Module) -> None:
    """The shards of a unit are in memory together while it is gathered."""
    if offload.with_states:
        return
    names = {
        module: name or "what is outside of the blocks" for name, module in model.named_modules()
    }
    units = [
        (sum(shard.nbytes for shard in shard_buffers(unit)), names[unit])
        for unit in sharded_modules(model)
    ]
    size, name = max(units, default=(0, ""))
    if size > offload.pool_bytes:
        least = -(-size // offload.buffer_count // 4)
        rule = (
            f"{offload.buffer_count} buffers hold {format_bytes(offload.pool_bytes)}, and {name},"
            f" gathered as one, has {format_bytes(size)}"
        )
        raise ConfigError(
            Problem(
                "zero_optimization.offload_param.buffer_size",
                offload.buffer_bytes // 4,
                rule,
                f"set it to {least} or more",
            )
        )


def large_states(make: Callable[[list[tuple[str, nn.Parameter]]], Optimizer]) -> int:
    """How many states shaped like a parameter an optimizer keeps at most, found by one step of a
    small one: matrices and vectors differ in some (Adafactor, Muon).
    """
    parameters = {
        name: nn.Parameter(torch.zeros(shape))
        for name, shape in (("weight", (8, 8)), ("bias", (8,)))
    }
    optimizer = make(list(parameters.items()))
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return max(
        sum(
            isinstance(value, torch.Tensor) and value.shape == p.shape
            for value in optimizer.state[p].values()
        )
        for p in parameters.values()
    )
