"""The stacks of another process's threads, written by that process in a signal handler in C: also
while a call holds the interpreter's lock, and while the process is stopped, which it is no longer
afterwards.

Knows nothing of torch: the launcher uses it too.
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
"""A real-time signal: users, Slurm and debuggers take others."""
ENDED = ("", "Z", "X")
"""States of a process that has ended, as `state` returns them."""
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple(
    {
        *(
            f"{path}{os.sep}"
            for path in (
                sysconfig.get_path("stdlib"),
                sysconfig.get_path("platstdlib"),
                sysconfig.get_path("purelib"),
            )
        ),
        *(f"{path}{os.sep}" for path in site.getsitepackages()),
    }
)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_LAUNCHED = "launching" + os.sep + "worker.py"


def is_users(path: str) -> bool:
    """Whether a source file is neither Plait's nor a library's."""
    return not path.startswith(_PACKAGE) and not is_library(path)


def is_library(path: str) -> bool:
    """Whether a source file is that of an installed library, or of Python."""
    return path.startswith((*_LIBRARIES, "<")) or path.endswith(_LAUNCHED)


def users_line(stack: Path | None) -> str:
    """The innermost line of the user's code on the main thread of a stack file, else the innermost
    of any: `train.py:33 in loss`.
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
    frames = threads[-1] if threads else []  # the main thread is the last of faulthandler's
    own = next((frame for frame in frames if is_users(frame[0])), frames[0] if frames else None)
    return f"{own[0]}:{own[1]} in {own[2]}" if own is not None else ""


def collect(process: int, written: Path, kept: Path, seconds: float) -> Path | None:
    """Let a process write its stacks, and copy them to `kept`; None where it does not within
    `seconds`, or cannot be asked.
    """
    before = _size(written)
    try:
        os.kill(process, SIGNAL)
        # the signal of a stopped process is delivered when it goes on
        os.kill(process, signal.SIGCONT)
    except OSError:
        return None
    ends = time.monotonic() + seconds
    size = before
    last = before
    while time.monotonic() < ends:
        time.sleep(0.05)
        last = size
        size = _size(written)
        if size > before and size == last:
            break
    if size == before:
        return None
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(written.read_bytes()[before:])
        return kept
    return None


def new_folder() -> Path:
    """Make a folder for stack files that stay after the run.

    Only this user can enter it. Its name cannot be predicted, so that no other user of the machine
    can put a link there first, through which this process would overwrite a file of its own user.
    """
    return Path(tempfile.mkdtemp(prefix=f"plait-stacks-{time.strftime('%Y%m%d-%H%M%S')}-"))


def state(process: int) -> str:
    """The kernel's letter for a process: `T` is stopped, `Z` ended; empty where there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def machine() -> str:
    """What processes that see each other's `/proc` have in common."""
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
