"""Signals from the launcher of several machines to the launcher on each machine.

Note [Lifeline]
    The launcher of a machine reads lines from its standard input. `SIGINT 300` means: act as after
    SIGINT, and give the ranks 300 seconds. The end of the input means that the connection or the
    launcher at its other end is gone. The ranks are then ended as by SIGTERM, so that no machine
    continues alone. This works through `ssh` without a terminal.

The module also handles the signals that end a launch.
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


class HasGrace(Protocol):
    """Object that waits `grace_seconds` after a signal."""

    grace_seconds: float


def format_line(number: signal.Signals, grace_seconds: float) -> bytes:
    """Return the line that requests a signal."""
    return f"{number.name} {grace_seconds:g}\n".encode()


def follow(agent: HasGrace, stream: Iterable[bytes] | None = None) -> None:
    """Read lines in a thread until this process ends, and send it the requested signals.

    Args:
        agent: Receives the grace of each request.
        stream: Source of the lines. None for standard input.
    """
    # sys.stdin is not used, because the interpreter cannot end while a thread holds the lock of its
    # buffer.
    source = stream if stream is not None else io.FileIO(0, closefd=False)
    threading.Thread(
        target=_follow, args=(agent, source), name="plait-lifeline", daemon=True
    ).start()


def _follow(agent: HasGrace, stream: Iterable[bytes]) -> None:
    for text in stream:
        name, _, seconds = text.decode(errors="replace").strip().partition(" ")
        if name in ("SIGINT", "SIGTERM"):
            agent.grace_seconds = float(seconds)
            os.kill(os.getpid(), signal.Signals[name])
    # The end of the input. See Note [Lifeline].
    os.kill(os.getpid(), signal.SIGTERM)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that end a launch. Schedulers send SIGUSR1 before a time limit (Slurm's --signal)."""


@contextmanager
def on_signals(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
    numbers: Sequence[signal.Signals] = SIGNALS,
) -> Iterator[None]:
    """Handle those of the signals that are not ignored, and restore the old handlers at exit.

    Nothing happens outside of the main thread, where Python does not allow handlers.

    Args:
        handler: The handler.
        numbers: The signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {number: signal.getsignal(number) for number in numbers}
    for number, previous in previous_handlers.items():
        # nohup ignores SIGHUP, which must stay so.
        if previous is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)
