"""Behaviour of all commands on a terminal: tables, progress bars, signals, and a closed output."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rich.console import Console


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    indent: str = "  ",
) -> None:
    """Print a table, unless it has no rows.

    Nothing is truncated: long cells are folded on a terminal, and kept in one line in a pipe.

    Args:
        console: The console. Lines are printed if it is not a terminal.
        columns: Headings.
        rows: Cells of each row.
        indent: Indentation of the lines in a pipe.
    """
    if not rows:
        return
    if not console.is_terminal:
        print("\n".join(aligned([columns, *rows], indent=indent)), end="\n\n")
        return
    # rich takes long to import, and `plait --help` imports this module.
    from rich.table import Table

    table = Table(*columns)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*row)
    # The console may have soft_wrap for its other lines, which would break the table.
    console.print(table, soft_wrap=False)


def aligned(
    rows: Sequence[Sequence[str]], *, indent: str = "", max_widths: Mapping[int, int] | None = None
) -> list[str]:
    """Return one line per row with aligned columns.

    Args:
        rows: Cells of each row. All rows have the same number of cells.
        indent: Indentation of the lines.
        max_widths: Largest widths of columns by their index. Longer cells push later cells of their
            line to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for index, limit in (max_widths or {}).items():
        if index < len(widths):
            widths[index] = min(widths[index], limit)
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(indent + "  ".join(cells).rstrip())
    return lines


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


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that end a launch. Schedulers send SIGUSR1 before a time limit (Slurm's --signal)."""


@contextmanager
def on_signals(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
    numbers: Sequence[signal.Signals] = SIGNALS,
) -> Iterator[None]:
    """Handle the signals that are not ignored, and restore the old handlers at exit.

    Does nothing outside the main thread, where Python does not allow handlers.

    Args:
        handler: The handler.
        numbers: The signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {number: signal.getsignal(number) for number in numbers}
    for number, previous in previous_handlers.items():
        # nohup ignores SIGHUP, which must stay ignored.
        if previous is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)


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


def close_stdout(error: OSError) -> int:
    """Close standard output after a write to it failed, and return the exit code.

    If the reader is gone, as with `| head -1`, nothing is printed. Other errors, such as a full
    disk, are reported.
    """
    # Otherwise Python would report the error again when it flushes the stream at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return 128 + signal.SIGPIPE
    print(
        f"plait: standard output cannot be written ({error.strerror}); free some space, or write to"
        " another file",
        file=sys.stderr,
    )
    return 1
