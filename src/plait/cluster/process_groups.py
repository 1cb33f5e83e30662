"""Default process group: its store, fake groups, and its destruction.

The processes of a launch meet in a store. A default group that was destroyed leaves its addresses
in the store, and its sockets still answer. A rank that read these addresses for the next group
would wait in the old group for ranks that wait elsewhere. Every default group therefore has its own
prefix of keys. A store exists as long as the process.

A dry run uses torch's fake groups, which send nothing. One process then has the groups of a layout
of thousands of processes.

Note [Threads of gloo]
    After a collective, a thread of gloo releases its tensors, for which it may need the
    interpreter's lock. If the interpreter shuts down at this moment, the process aborts (SIGABRT,
    "terminate called without an active exception") after all its work was done, about one time in
    ten. `destroy_process_group` does not end the threads, because torch still references the groups
    of a sharded model. Before a process ends, gloo's threads therefore get the time, and
    the lock, to finish. Plait's own worker processes end without the interpreter's shutdown.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from plait._torch.tensors import forget_meshes
from plait.cluster.topology import RankInfo, address_of_method, init_method

_stores: dict[str, _SharedStore] = {}
"""Stores by address."""
FAKE = "fake"
"""torch's name of the fake backend."""
_LONGEST_SECONDS = 2.0
"""Longest time to wait for busy threads. On a loaded machine they may need it to finish."""
_PAUSE_SECONDS = 0.005
"""Time between two checks of the threads."""
_QUIET_CHECKS = 4
"""Number of consecutive checks that must find all threads asleep."""
_GLOO_THREAD = "pt_gloo_runloop"
"""Name that torch gives to the threads of gloo."""


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
    address = address_of_method(method)
    if address not in _stores:
        store, _, _ = next(
            rendezvous(method, rank_info.rank, rank_info.world_size, timeout=timeout)
        )
        _stores[address] = _SharedStore(store)
    shared = _stores[address]
    # Creating a default group is collective, so all ranks use the same number.
    shared.groups += 1
    shared.store.set_timeout(timeout)
    return dist.PrefixStore(f"plait/default_group/{shared.groups}", shared.store)


@dataclass
class _SharedStore:
    """Store of all default groups with the same rendezvous address.

    Attributes:
        store: The store.
        groups: Number of groups that used it.
    """

    store: dist.Store
    groups: int = 0


def is_fake(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether a group, by default the default group, is torch's fake process group.

    The result is False if there is no process group.
    """
    return dist.is_initialized() and dist.get_backend(group) == FAKE


def end_process(code: int) -> NoReturn:
    """Flush the output and end this process without the interpreter's shutdown.

    Functions that are registered with `atexit` are not called.

    Args:
        code: Exit code.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_default_group() -> None:
    """Destroy all process groups after gloo's threads have released their tensors."""
    if dist.is_initialized():
        let_threads_finish()
        forget_meshes()
        dist.destroy_process_group()


def end_groups(groups: Collection[dist.ProcessGroup]) -> None:
    """Destroy process groups after gloo's threads have released their tensors.

    Groups that were destroyed before, individually or with the default group, are ignored.
    """
    if groups and dist.is_initialized():
        let_threads_finish()
        forget_meshes()
        for group in groups:
            # torch raises ValueError for a group that was destroyed before.
            with suppress(ValueError):
                dist.destroy_process_group(group)


@functools.cache
def finish_at_exit() -> None:
    """Let gloo's threads finish before the interpreter shuts down.

    This covers groups that other code creates and destroys. Further calls have no effect.
    """
    atexit.register(let_threads_finish)


def let_threads_finish() -> None:
    """Wait until gloo's threads sleep, see Note [Threads of gloo].

    This thread pauses between its checks, so that gloo's threads can take the GIL. A
    thread of gloo also sleeps in a collective whose other ranks are gone, so this never waits for
    other ranks.
    """
    deadline = time.monotonic() + _LONGEST_SECONDS
    quiet_checks = 0
    while quiet_checks < _QUIET_CHECKS and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
        if _has_busy_thread():
            quiet_checks = 0
        else:
            quiet_checks += 1


def _has_busy_thread() -> bool:
    """Return whether a thread of gloo runs or is ready to run.

    The result is False if the system does not report the state of threads.
    """
    try:
        tasks = list(Path("/proc/self/task").glob("*/stat"))
    except OSError:
        # The process has reached its limit of open files.
        return False
    for task in tasks:
        with suppress(OSError, ValueError):
            # `NUMBER (NAME) STATE ...`, where the name may have parentheses.
            name, _, fields = task.read_text().partition("(")[2].rpartition(")")
            # S is the state of a thread that sleeps until an event.
            if name == _GLOO_THREAD and not fields.startswith(" S"):
                return True
    return False
