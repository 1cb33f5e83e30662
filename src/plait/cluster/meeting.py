"""Where the processes of this launch meet: one store for each place, which stays while the process
lives.

A default group that was ended leaves its addresses in the store, and its sockets still answer: a
rank that found them for the next group would wait in it for ranks that wait elsewhere. So every
default group that is made here has keys of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from plait.cluster.topology import RankInfo, init_method, meeting_address


@dataclass
class _Met:
    """A store, and how many groups had keys of it."""

    store: dist.Store
    groups: int = 0


_met: dict[str, _Met] = {}


def store_of_next_group(here: RankInfo, timeout: timedelta) -> dist.Store:
    """The store of the default group that is made next; a process alone meets nobody. Collective.
    Raises ConfigError where the processes do not know where to meet.
    """
    if here.world_size == 1:
        return dist.HashStore()
    method = init_method()
    address = meeting_address(method)
    if address not in _met:
        store, _, _ = next(rendezvous(method, here.rank, here.world_size, timeout=timeout))
        _met[address] = _Met(store)
    met = _met[address]
    met.groups += 1
    met.store.set_timeout(timeout)
    return dist.PrefixStore(f"plait/default_group/{met.groups}", met.store)
