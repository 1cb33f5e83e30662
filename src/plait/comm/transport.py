"""How the data-parallel collectives of a group move their bytes: through memory that the ranks of
one machine share, or by torch's own.

`connect` decides once for a group, the same on every rank, with the reason. Shared memory is for
tensors on the CPU: gloo moves them through loopback sockets, several times slower. GPUs keep NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from plait._torch.units import AllGather, ReduceScatter
from plait.comm.buckets import Buckets, Flat, GroupBuckets
from plait.comm.reduce_scatter import AllToAllReduceScatter
from plait.comm.shared_memory.collectives import SharedAllGather, SharedBuckets, SharedReduceScatter
from plait.comm.shared_memory.host import Host, Unavailable
from plait.errors import ConfigError, Problem

TransportName = Literal["prefer-shared-memory", "shared-memory", "torch"]
"""`prefer-shared-memory` takes it where a group has it."""


@dataclass(frozen=True)
class Transport:
    """How one group communicates."""

    name: Literal["torch", "shared-memory"]
    reason: str
    buckets: Callable[[Sequence[Flat]], Buckets]
    """Makes buffers that are summed over the group. Collective."""
    all_gather: AllGather | None = None
    """What `fully_shard` calls in place of its own; None keeps it."""
    reduce_scatter: ReduceScatter | None = None
    host: Host | None = None
    """The ranks that share memory."""


def connect(
    group: dist.ProcessGroup,
    *,
    label: str,
    device: torch.device,
    wanted: TransportName = "prefer-shared-memory",
) -> Transport:
    """The transport of `group`, whose tensors are on `device`. Collective. `label` names the group
    in errors.

    Raises ConfigError where shared memory is wanted and cannot be had.
    """
    if wanted == "torch":
        return _by_torch(group, device, "set in the configuration")
    backend = dist.get_backend(group)
    if backend != "gloo":
        if wanted == "shared-memory":
            raise _refused(
                f"the group over {label} uses {backend}, and shared memory is for CPU tensors"
            )
        return _by_torch(group, device, f"the group over {label} uses {backend}")
    try:
        host = Host(group, label=label)
    except Unavailable as unavailable:
        if wanted == "shared-memory":
            raise _refused(str(unavailable)) from None
        return _by_torch(group, device, str(unavailable))

    def buckets(flats: Sequence[Flat]) -> Buckets:
        try:
            return SharedBuckets(host, flats)
        except Unavailable as unavailable:
            if wanted == "shared-memory":
                raise _refused(str(unavailable)) from None
            return GroupBuckets(group, flats, device)

    return Transport(
        "shared-memory",
        (
            "set in the configuration"
            if wanted == "shared-memory"
            else f"all {host.ranks} ranks over {label} see the same memory"
        ),
        buckets=buckets,
        all_gather=SharedAllGather(host),
        reduce_scatter=SharedReduceScatter(host),
        host=host,
    )


def _by_torch(group: dist.ProcessGroup, device: torch.device, reason: str) -> Transport:
    scatter = AllToAllReduceScatter() if device.type == "cpu" else None
    return Transport(
        "torch",
        reason,
        buckets=lambda flats: GroupBuckets(group, flats, device),
        reduce_scatter=scatter,
    )


def _refused(rule: str) -> ConfigError:
    return ConfigError(
        Problem("parallel.transport", "shared-memory", rule, 'use "auto" or "torch"')
    )
