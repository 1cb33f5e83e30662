"""End of process groups and of worker processes.

Note [Threads of gloo]
    After a collective, a thread of gloo releases its tensors, for which it may need the
    interpreter's lock. If the interpreter shuts down at this moment, the process aborts (SIGABRT,
    "terminate called without an active exception") after all its work was done, about one time in
    ten. `destroy_process_group` does not end the threads, because torch references the groups of a
    sharded model afterwards. Before a process ends, its threads therefore get the time, and the
    lock, to finish. Plait's own worker processes end without the interpreter's shutdown.
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
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from plait._torch.dtensor import forget_meshes

LONGEST_SECONDS = 2.0
"""Longest time to wait for busy threads. On a loaded machine they may not get to sleep earlier."""
_PAUSE_SECONDS = 0.005
"""Interval at which the threads are checked."""
_QUIET_CHECKS = 4
"""Number of checks in sequence that must find all threads asleep."""
_GLOO_THREAD = "pt_gloo_runloop"
"""Name that torch gives to the threads of gloo."""


def end_process(code: int) -> NoReturn:
    """End this process after its output was written, without the interpreter's shutdown.

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

    Groups that were destroyed before, alone or with the default group, are ignored.
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
    """Return when gloo's threads sleep, see Note [Threads of gloo].

    Each pause gives them the interpreter's lock. A thread in a collective whose other ranks are
    gone sleeps too, so this never waits for other ranks.
    """
    deadline = time.monotonic() + LONGEST_SECONDS
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
    for task in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError, ValueError):
            # `NUMBER (NAME) STATE ...`, where the name may have parentheses.
            name, _, fields = task.read_text().partition("(")[2].rpartition(")")
            # S is the state of a thread that sleeps until an event.
            if name == _GLOO_THREAD and not fields.startswith(" S"):
                return True
    return False
