"""Check of the limit of open files, before processes open connections to each other.

A process that reaches its limit of open files fails while it connects to other processes, which
would then wait for it until their timeout. The processes therefore exchange the result of the check
through the rendezvous store.
"""

from __future__ import annotations

import os
import resource
import time

import torch.distributed as dist

from plait.cluster.topology import RankInfo
from plait.errors import InputError

_BASE_FILES = 24
"""Files of a process besides its connections: store, event loops, board, shared memory."""
_FILES_PER_RANK = 2
"""Connections to another rank: one in the default group and one in the group of an axis."""
_ENOUGH_FILES = 4096
"""Limit of open files that suffices for a process."""
_MOST_RANKS = 64
"""Ranks that are counted. Groups of more processes use backends that connect fewer of them."""
_KEY = "open_files"
"""Key of the problem in the store. Its value is empty if no rank has a problem."""
_FAREWELL_SECONDS = 10.0
"""Longest time for which rank 0 keeps the store alive after it has found a problem."""


def check_open_files(store: dist.Store, rank_info: RankInfo) -> None:
    """Raise InputError on all ranks if one of them may not open enough files. Collective.

    Args:
        store: Store of the default group that is created next.
        rank_info: Place of this process.
    """
    problem = _problem(rank_info.world_size)
    if problem:
        message = f"rank {rank_info.rank}: {problem}"
        store.set(_KEY, message)
        if rank_info.rank == 0:
            _let_others_read(store, rank_info.world_size - 1)
        raise InputError(message)

    if store.add(f"{_KEY}/checked", 1) == rank_info.world_size:
        store.set(_KEY, "")
    message = store.get(_KEY).decode()
    if message:
        store.add(f"{_KEY}/read", 1)
        raise InputError(message)


def _let_others_read(store: dist.Store, others: int) -> None:
    """Keep the store of rank 0 alive until the other ranks have read the problem."""
    deadline = time.monotonic() + _FAREWELL_SECONDS
    while store.add(f"{_KEY}/read", 0) < others and time.monotonic() < deadline:
        time.sleep(0.05)


def _problem(world_size: int) -> str:
    """Return why the limit on open files is too low for a run, or an empty string."""
    needed = _BASE_FILES + _FILES_PER_RANK * min(world_size - 1, _MOST_RANKS)
    descriptors: list[int] = []
    try:
        while len(descriptors) < needed:
            descriptors.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        remedy = "ulimit -n 4096"
        # Only an administrator can raise the limit above the hard limit.
        if hard_limit != resource.RLIM_INFINITY and hard_limit < _ENOUGH_FILES:
            remedy = (
                f"its hard limit is {hard_limit:,}, so set nofile in /etc/security/limits.conf, or"
                " start the container with --ulimit nofile=4096"
            )
        return (
            f"ulimit -n: the process may have {limit:,} open files and can open"
            f" {len(descriptors)} more ({error.strerror}), and its connections need {needed}; raise"
            f" the limit on its machine: {remedy}"
        )
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return ""
