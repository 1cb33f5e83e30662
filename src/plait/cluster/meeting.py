"""Stores in which the processes of a launch meet to create a default process group.

A default group that was destroyed leaves its addresses in the store, and its sockets still answer.
A rank that read them for the next group would wait in the old group for ranks that wait elsewhere.
Every default group therefore has its own prefix of keys. A store exists as long as the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from plait.cluster.topology import RankInfo, init_method, meeting_address


@dataclass
class _SharedStore:
    """Store of all default groups that met at one address.

    Attributes:
        store: The store.
        groups: Number of groups that used it.
    """

    store: dist.Store
    groups: int = 0


_met: dict[str, _SharedStore] = {}
"""Stores by address."""


def store_of_next_group(rank_info: RankInfo, timeout: timedelta) -> dist.Store:
    """Return the store for the next default group. Collective.

    Args:
        rank_info: Place of this process.
        timeout: Longest time to wait for the other processes.

    Raises:
        ConfigError: No rendezvous address is configured.
    """
    if rank_info.world_size == 1:
        return dist.HashStore()
    method = init_method()
    address = meeting_address(method)
    if address not in _met:
        store, _, _ = next(
            rendezvous(method, rank_info.rank, rank_info.world_size, timeout=timeout)
        )
        _met[address] = _SharedStore(store)
    shared = _met[address]
    # Creating a default group is collective, so all ranks use the same number.
    shared.groups += 1
    shared.store.set_timeout(timeout)
    return dist.PrefixStore(f"plait/default_group/{shared.groups}", shared.store)
