"""`deepspeed.comm`: torch.distributed under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from plait.cluster.topology import place
from plait.compat.deepspeed.distributed import init_distributed
from plait.compat.deepspeed.refused import missing

__all__ = ["get_global_rank", "get_local_rank", "get_world_group", "init_distributed"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if not hasattr(dist, name):
        raise missing(
            "deepspeed.comm",
            name,
            {},
            otherwise="call torch.distributed, whose default group is the one that Plait uses",
        )
    return getattr(dist, name)


def get_local_rank() -> int:
    """Return the rank of this process on its machine."""
    return place().local_rank


def get_world_group() -> dist.ProcessGroup | None:
    """Return torch's default group, or None if it does not exist yet."""
    return dist.group.WORLD


def get_global_rank(group: dist.ProcessGroup | None = None, group_rank: int = 0) -> int:
    """Return the global rank of a process of a group."""
    if group is None:
        return group_rank
    return dist.get_global_rank(group, group_rank)
