"""Behaviour of all commands on a terminal: progress bars, ending signals, and a closed output."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from plait.cli.launching.lifeline import on_signals

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals whose default action ends a process without running `finally`.

Python itself turns SIGINT into an exception.
"""


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Raise SystemExit with 128 + N for SIGTERM and SIGHUP, so that partial output is removed.

    A second signal ends the process immediately.
    """

    def exit_process(number: int, _: FrameType | None) -> NoReturn:
        for ending_signal in ENDING_SIGNALS:
            signal.signal(ending_signal, signal.SIG_DFL)
        raise SystemExit(128 + number)

    with on_signals(exit_process, ENDING_SIGNALS):
        yield


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal, and nothing in a pipe.

    Yields:
        A function that receives the number of completed items and the number of all items.
    """
    # rich takes long to import, and `plait --help` imports this module.
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda completed, total: None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(title)
        yield lambda completed, total: bar.update(task, completed=completed, total=total)


def close_stdout(error: OSError) -> int:
    """Close standard output after an error of writing to it, and return the exit code.

    The reader may be gone, as with `| head -1`, or the disk may be full, which is printed.
    """
    # Otherwise Python would report the error again when it flushes the stream at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return 128 + signal.SIGPIPE
    print(f"plait: standard output cannot be written ({error.strerror})", file=sys.stderr)
    return 1
