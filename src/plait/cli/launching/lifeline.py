"""How the launcher of several machines reaches the launcher on each of them: a line of text on its
standard input.

`SIGINT 300` means: take SIGINT, and give the ranks 300 seconds. The end of the input means that the
connection, or the launcher at its other end, is gone: the ranks are ended as by SIGTERM, so that no
machine computes on alone. Works through `ssh` without a terminal.
"""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol


class Patient(Protocol):
    """Something that waits `grace_seconds` after a signal."""

    grace_seconds: float


def line(number: signal.Signals, grace_seconds: float) -> bytes:
    """The line that asks for a signal."""
    return f"{number.name} {grace_seconds:g}\n".encode()


def follow(agent: Patient, stream: Iterable[bytes] | None = None) -> None:
    """Read lines in the background for the rest of this process and signal it as they say."""
    # Not sys.stdin: a thread that waits in its buffer's lock cannot be left behind when the
    # interpreter ends.
    source = stream if stream is not None else io.FileIO(0, closefd=False)
    threading.Thread(
        target=_follow, args=(agent, source), name="plait-lifeline", daemon=True
    ).start()


def _follow(agent: Patient, stream: Iterable[bytes]) -> None:
    for text in stream:
        name, _, seconds = text.decode(errors="replace").strip().partition(" ")
        if name in ("SIGINT", "SIGTERM"):
            agent.grace_seconds = float(seconds)
            os.kill(os.getpid(), signal.Signals[name])
    os.kill(os.getpid(), signal.SIGTERM)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""That end a launch. Schedulers send SIGUSR1 before a limit of time (Slurm's --signal)."""


@contextmanager
def on_signals(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
    numbers: Sequence[signal.Signals] = SIGNALS,
) -> Iterator[None]:
    """Handle the ending signals that are not ignored, and restore what was before. Only the main
    thread may.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    for number, previous in before.items():
        if previous is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
