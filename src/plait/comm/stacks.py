"""Stacks of the threads of another process.

The other process writes them in a signal handler that is implemented in C (`faulthandler`), which
works even while a call holds the interpreter's lock. A stopped process is resumed to write its
stacks, and is not stopped again.

The module does not import torch, because the launcher also uses it.
"""

from __future__ import annotations

import os
import re
import signal
import site
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from pathlib import Path

SIGNAL = signal.SIGRTMAX - 2
"""Real-time signal that makes a process write its stacks. Slurm and debuggers use other ones."""
ENDED = ("", "Z", "X")
"""States of a process that has ended, as `state` returns them."""
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_WORKER_FILE = "launching" + os.sep + "worker.py"
"""End of the path of the module that runs the user's script under `plait launch`."""


def _library_folders() -> tuple[str, ...]:
    """Return the folders of Python and of installed libraries, each with a final separator."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")]
    paths += site.getsitepackages()
    return tuple({f"{path}{os.sep}" for path in paths})


_LIBRARIES = _library_folders()


def is_users(path: str) -> bool:
    """Return True if a source file is user code, and not part of Plait or of a library."""
    return not path.startswith(_PACKAGE) and not is_library(path)


def is_library(path: str) -> bool:
    """Return True if a source file belongs to an installed library or to Python."""
    return path.startswith((*_LIBRARIES, "<")) or path.endswith(_WORKER_FILE)


def users_line(stack: Path | None) -> str:
    """Return the innermost line of user code on the main thread, e.g. `train.py:33 in loss`.

    Args:
        stack: File that `collect` wrote.

    Returns:
        The line, or that of the innermost frame if no frame is user code. An empty string without a
        stack.
    """
    if stack is None:
        return ""
    threads: list[list[tuple[str, str, str]]] = []
    for line in stack.read_text(errors="replace").splitlines():
        match = _FRAME.match(line)
        if line.startswith(("Thread", "Current thread")):
            threads.append([])
        elif match is not None and threads:
            threads[-1].append((match[1], match[2], match[3]))

    # faulthandler writes the main thread last, and the innermost frame first.
    if not threads or not threads[-1]:
        return ""
    frames = threads[-1]
    path, number, function = next((frame for frame in frames if is_users(frame[0])), frames[0])
    return f"{path}:{number} in {function}"


def collect(process: int, written: Path, copy: Path, seconds: float) -> Path | None:
    """Make a process write its stacks, and copy them.

    Args:
        process: Number of the process (PID).
        written: File to which the process appends its stacks.
        copy: File that receives the new stacks. Its folder is created.
        seconds: Longest time to wait.

    Returns:
        `copy`, or None if the process cannot receive the signal or has not written in time.
    """
    size_before = _size(written)
    try:
        os.kill(process, SIGNAL)
        # A stopped process receives the signal when it continues.
        os.kill(process, signal.SIGCONT)
    except OSError:
        return None

    deadline = time.monotonic() + seconds
    size = size_before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        last_size = size
        size = _size(written)
        # The handler writes line by line, so the stacks are complete when the file stops growing.
        if size > size_before and size == last_size:
            break
    if size == size_before:
        return None

    with suppress(OSError):
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(written.read_bytes()[size_before:])
        return copy
    return None


def new_folder() -> Path:
    """Create a folder for stack files that are kept after the run.

    Only this user can enter it. Its name cannot be predicted. Otherwise another user of the machine
    could create a link with that name first, and this process would overwrite the link's target.
    """
    return Path(tempfile.mkdtemp(prefix=f"plait-stacks-{time.strftime('%Y%m%d-%H%M%S')}-"))


def state(process: int) -> str:
    """Return the kernel's letter for the state of a process, for example `T` for a stopped one.

    The result is an empty string if there is no such process.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def machine() -> str:
    """Return an identifier that is equal for processes that see each other in `/proc`.

    It contains the boot id and the PID namespace, because containers on one machine have the same
    boot id but do not see each other's processes.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{sys.platform} {os.getpid()}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
