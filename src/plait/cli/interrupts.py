"""Signals that end a command, as exceptions: what it has begun to write is removed, as after
Ctrl-C.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from plait.cli.launching.lifeline import on_signals

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Python raises SIGINT by itself; of these the default ends a process at once, and `finally` does
not run.
"""


@contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit with 128 + N; a second one ends the process at once."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        for one in ENDING:
            signal.signal(one, signal.SIG_DFL)
        raise SystemExit(128 + number)

    with on_signals(end, ENDING):
        yield
