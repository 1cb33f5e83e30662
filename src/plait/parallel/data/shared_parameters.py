"""Zero-copy all-gather: parameters in memory that the ranks of one machine share (`comm.host_parameters`). A rank's shards are its part of
that memory, and an all-gather copies nothing."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from plait._torch.gathering import gather_in_place
from plait._torch.units import replace_shard_buffers, shard_buffers, sharded_modules
from plait.cluster.host_memory import trim_heap
from plait.comm.host import Host, Unavailable
from plait.comm.host_parameters import HostParameters

HELD_TWICE = 32 << 20
"""Bytes of shards that are copied before the C library gives the system what the first copies took: it keeps it otherwise."""


def share_parameters(model: nn.Module, host: Host) -> str:
    """Put every unit's shards where all ranks of `host` see them; a unit that finds no memory, or mixes dtypes, is gathered as before.
    Returns a description of that, if there is one. Collective over `dp_shard`; before anyone keeps a rank's part of a parameter."""
    units = sharded_modules(model)
    gathered = [why for unit in units if (why := _hold(unit, host))]
    return f"{len(gathered)} of {len(units)} units are gathered all the same: {gathered[0]}" if gathered else ""


def _hold(unit: FSDPModule, host: Host) -> str:
    """Why not, if not."""
    numels = [shard.numel() for shard in shard_buffers(unit)]
    dtypes = {shard.dtype for shard in shard_buffers(unit)}
    if not numels:
        return ""
    if len(dtypes) > 1:
        return "a unit has several dtypes"
    try:
        memory = HostParameters(host, numels, dtypes.pop())
    except Unavailable as unavailable:
        return str(unavailable)
    _place(unit, memory)
    gather_in_place(unit, memory.wholes, begin=partial(_begin, unit, memory), finish=memory.finish, release=memory.release)
    return ""


def _begin(unit: FSDPModule, memory: HostParameters) -> None:
    if any(shard.data_ptr() != row.data_ptr() for shard, row in zip(shard_buffers(unit), memory.rows, strict=True)):
        _place(unit, memory)  # the user put other tensors in their place
    memory.begin()


def _place(unit: FSDPModule, memory: HostParameters) -> None:
    rows, freed = iter(memory.rows), 0

    def place(shard: torch.Tensor) -> torch.Tensor:
        nonlocal freed
        if freed >= HELD_TWICE:
            trim_heap()
            freed = 0
        freed += shard.nbytes
        return next(rows).copy_(shard)

    replace_shard_buffers(unit, place)
    trim_heap()
