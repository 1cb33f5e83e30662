"""The end of process groups, and of a worker process.

After a collective, a thread of gloo lets go of its tensors, for which it may need the interpreter's
lock. If the interpreter shuts down just then, the process aborts (SIGABRT, "terminate called
without an active exception") after all its work was done, about one time in ten. The threads do not
end with `destroy_process_group`: once a model was sharded, torch keeps its groups. So before a
process ends its threads get the time, and the lock, to finish. A worker of Plait's own leaves
without the interpreter's shutdown.
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
"""Of waiting for threads that are busy, on a machine that has more to do."""
_PAUSE_SECONDS = 0.005
_QUIET = 4
"""How often threads are looked at, and how often in a row they must be seen asleep."""
_GLOO = "pt_gloo_runloop"


def end_process(code: int) -> NoReturn:
    """End this process with `code`, once its output is written. Nothing registered with `atexit`
    runs.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_default_group() -> None:
    """Destroy all process groups, once gloo's threads have let go of what they computed."""
    if dist.is_initialized():
        let_threads_finish()
        forget_meshes()
        dist.destroy_process_group()


def end_groups(groups: Collection[dist.ProcessGroup]) -> None:
    """The same for some groups. One that was destroyed before, alone or with the default group, is
    passed over.
    """
    if groups and dist.is_initialized():
        let_threads_finish()
        forget_meshes()
        for group in groups:
            with suppress(ValueError):
                dist.destroy_process_group(group)


@functools.cache
def finish_at_exit() -> None:
    """Let gloo's threads finish before the interpreter shuts down, no matter who made and ended the
    groups. Once a process.
    """
    atexit.register(let_threads_finish)


def let_threads_finish() -> None:
    """Return when gloo's threads sleep. Each pause gives them the interpreter's lock. A thread in a
    collective whose other ranks are gone sleeps too, so this never waits for them.
    """
    ends = time.monotonic() + LONGEST_SECONDS
    quiet = 0
    while quiet < _QUIET and time.monotonic() < ends:
        time.sleep(_PAUSE_SECONDS)
        quiet = 0 if _busy() else quiet + 1


def _busy() -> bool:
    """Whether a thread of gloo runs or wants to. False where the system does not report it."""
    for task in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError, ValueError):
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
            if name == _GLOO and not rest.startswith(" S"):
                return True
    return False
