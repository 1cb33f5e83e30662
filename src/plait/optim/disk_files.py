"""Construction of the `DiskTier` that a configuration describes, for a sharded model."""

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
from plait.parallel.techniques.parameter_offload import ParameterOffload
from plait.units import format_bytes


def build_disk_tier(
    resolved: Resolved, model: nn.Module, units: Collection[str]
) -> DiskTier | None:
    """Create the files of a model, or return None if the configuration stores nothing in files.

    Args:
        resolved: The configuration.
        model: The sharded model. It may not have its weights yet.
        units: Paths of the units whose states are in files. "" stands for the full model.

    Raises:
        ConfigError: The buffers are too small for the parameters that are gathered together.
    """
    states = resolved.optimizer_offload
    parameters = resolved.parameter_offload
    if states.device != "nvme" and parameters.device != "nvme":
        return None

    arena = None
    if states.device == "nvme":
        arena = Arena(Path(states.path or "."))
    shards = None
    if parameters.device == "nvme":
        _refuse_small_pool(parameters, model)
        if arena is not None and parameters.path == states.path:
            shards = arena
        else:
            shards = Arena(
                Path(parameters.path or "."), field="zero_optimization.offload_param.nvme_path"
            )

    buffers = states if arena is not None else parameters
    tier = DiskTier(
        arena,
        buffer_bytes=buffers.buffer_bytes,
        buffer_count=buffers.buffer_count,
        shards=shards,
        pool_bytes=parameters.pool_bytes,
    )
    state_count = large_states(lambda named: build_optimizer(resolved.optimizer, named))
    tier.adopt(
        model,
        states=state_count,
        units=units,
        shards_of=units if parameters.with_states else ("",),
    )
    return tier


def _refuse_small_pool(offload: ParameterOffload, model: nn.Module) -> None:
    """Raise ConfigError if the shards of a unit do not fit into the buffers.

    The shards of a unit are in memory together while it is gathered.
    """
    if offload.with_states:
        return
    names = {
        module: name or "what is outside of the blocks" for name, module in model.named_modules()
    }
    units = []
    for unit in sharded_modules(model):
        unit_bytes = sum(shard.nbytes for shard in shard_buffers(unit))
        units.append((unit_bytes, names[unit]))
    size, name = max(units, default=(0, ""))
    if size <= offload.pool_bytes:
        return
    # The setting counts elements of 4 bytes.
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
    """Return the largest number of states with the shape of a parameter that one parameter has.

    It is counted after a step on a small matrix and a small vector, because some optimizers keep
    different states for them (Adafactor, Muon).

    Args:
        make: Builds the optimizer from (name, parameter) pairs.
    """
    parameters = {
        "weight": nn.Parameter(torch.zeros(8, 8)),
        "bias": nn.Parameter(torch.zeros(8)),
    }
    optimizer = make(list(parameters.items()))
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    counts = []
    for parameter in parameters.values():
        values = optimizer.state[parameter].values()
        counts.append(
            sum(isinstance(v, torch.Tensor) and v.shape == parameter.shape for v in values)
        )
    return max(counts)
