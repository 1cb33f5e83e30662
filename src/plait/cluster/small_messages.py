"""Exchange of small values between ranks.

Every function is a collective call over its group, and waits for the result. Except in
`max_over_ranks`, None means the default group.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

from plait._torch.groups import all_gather_single

T = TypeVar("T")
Number = TypeVar("Number", int, float)


def all_gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the objects of all ranks. They must be picklable. Collective."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: T, group: dist.ProcessGroup | None = None, *, source: int = 0) -> T:
    """Return the object of one rank on all ranks. Collective.

    Args:
        value: A picklable object. The objects of the other ranks are not used.
        group: The process group.
        source: Number of the rank within the group.
    """
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=source)
    return box[0]


def all_gather_bytes(
    row: bytes, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[bytes]:
    """Return the byte strings of all ranks, which must have equal lengths. Collective.

    Args:
        row: Byte string of this rank.
        device: Device of the group's tensors.
        group: The process group.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [row]
    local = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(device)
    rows = local.new_empty(dist.get_world_size(group) * len(row))
    all_gather_single(rows, local, group=group)
    return [bytes(other) for other in rows.cpu().view(-1, len(row)).numpy()]


def max_over_ranks(
    values: list[Number], *groups: dist.ProcessGroup | None, device: torch.device
) -> list[Number]:
    """Return the maximum of each number over the ranks. Collective.

    Args:
        values: Numbers of this rank, all int or all float.
        groups: Process groups, which are reduced over one after the other. None is skipped.
            `dist.group.WORLD` is None before there is a default group.
        device: Device of the groups' tensors.
    """
    dtype = torch.float64 if isinstance(values[0], float) else torch.int64
    tensor = torch.tensor(values, dtype=dtype, device=device)
    for group in groups:
        if group is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.tolist()
