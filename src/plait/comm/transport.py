"""Transport of a data-parallel group's collectives: shared memory or torch.

`connect` decides once per group, with the same result on every rank, and returns the reason. Shared
memory is for tensors on the CPU, which gloo would send through loopback sockets several times
slower. GPUs use NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from plait._torch.units import AllGather, ReduceScatter
from plait.comm.all_reduce import Buckets, Flat, GroupBuckets
from plait.comm.collectives import AllToAllReduceScatter
from plait.comm.shared_memory.collectives import SharedAllGather, SharedBuckets, SharedReduceScatter
from plait.comm.shared_memory.host import SharedMemoryGroup, SharedMemoryUnavailable
from plait.errors import ConfigError, Problem

TransportName = Literal["prefer-shared-memory", "shared-memory", "torch"]
"""Requested transport. `prefer-shared-memory` falls back to torch. `shared-memory` does not."""


@dataclass(frozen=True)
class Transport:
    """Collectives of one process group.

    Attributes:
        name: The selected transport.
        reason: Reason of the selection, for reports.
        buckets: Function that creates gradient buckets which are summed over the group. Collective.
        all_gather: Replacement for the all-gather of `fully_shard`, or None to use torch's.
        reduce_scatter: Replacement for the reduce-scatter of `fully_shard`, or None to use torch's.
        host: Group of ranks with shared memory, or None if the ranks do not use shared memory.
    """

    name: Literal["torch", "shared-memory"]
    reason: str
    buckets: Callable[[Sequence[Flat]], Buckets]
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    host: SharedMemoryGroup | None = None


def connect(
    group: dist.ProcessGroup,
    *,
    label: str,
    device: torch.device,
    requested: TransportName = "prefer-shared-memory",
) -> Transport:
    """Select the transport of a process group. Collective.

    Args:
        group: The group.
        label: Name of the group for messages, usually that of its mesh dimension.
        device: Device of the tensors.
        requested: Requested transport.

    Raises:
        ConfigError: `requested` is "shared-memory", and the ranks cannot share memory.
    """
    if requested == "torch":
        return _torch_transport(group, device, "set in the configuration")

    is_required = requested == "shared-memory"
    backend = dist.get_backend(group)
    if backend != "gloo":
        reason = f"the group over {label} uses {backend}"
        if is_required:
            raise _refusal(f"{reason}, and shared memory is for CPU tensors")
        return _torch_transport(group, device, reason)

    try:
        host = SharedMemoryGroup(group, label=label)
    except SharedMemoryUnavailable as unavailable:
        if is_required:
            raise _refusal(str(unavailable)) from None
        return _torch_transport(group, device, str(unavailable))

    def make_buckets(flats: Sequence[Flat]) -> Buckets:
        # Buckets may be too large for shared memory, even if the group can share memory.
        try:
            return SharedBuckets(host, flats)
        except SharedMemoryUnavailable as unavailable:
            if is_required:
                raise _refusal(str(unavailable)) from None
            return GroupBuckets(group, flats, device)

    if is_required:
        reason = "set in the configuration"
    else:
        reason = f"all {host.ranks} ranks over {label} see the same memory"
    return Transport(
        "shared-memory",
        reason,
        buckets=make_buckets,
        all_gather=SharedAllGather(host),
        reduce_scatter=SharedReduceScatter(host),
        host=host,
    )


def _torch_transport(group: dist.ProcessGroup, device: torch.device, reason: str) -> Transport:
    # gloo's own reduce-scatter takes more than twice the time, see `comm.collectives`.
    reduce_scatter = AllToAllReduceScatter() if device.type == "cpu" else None

    def make_buckets(flats: Sequence[Flat]) -> Buckets:
        return GroupBuckets(group, flats, device)

    return Transport("torch", reason, buckets=make_buckets, reduce_scatter=reduce_scatter)


def _refusal(rule: str) -> ConfigError:
    return ConfigError(
        Problem("parallel.transport", "shared-memory", rule, 'use "auto" or "torch"')
    )
