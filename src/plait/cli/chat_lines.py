"""Input of a chat: the lines that the user types."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from io import TextIOWrapper
from queue import Empty, Queue
from threading import Thread

from rich.console import Console

POLL_SECONDS = 20.0
"""Time after which processes that wait for a line hear that there is none yet."""


def chat_lines(reads_input: bool, *, several: bool) -> Iterator[str | None]:
    """Yield the lines of the user, and "" at the end of the input.

    Args:
        reads_input: Whether this process reads standard input. Other processes yield "" forever,
            because they receive the lines from it.
        several: Whether other processes wait for each line. A long wait would be taken for a hang,
            so that None is yielded every `POLL_SECONDS` while there is no line.
    """
    console = Console(stderr=True, highlight=False)
    while not reads_input:
        yield ""

    # Bytes of another encoding would raise in the thread below.
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    requests: Queue[None] = Queue()
    lines: Queue[str] = Queue()

    def read() -> None:
        while True:
            requests.get()
            lines.put(sys.stdin.readline().strip())

    # A thread, because readline has no timeout.
    Thread(target=read, daemon=True).start()
    timeout = POLL_SECONDS if several else None
    while True:
        if sys.stdin.isatty():
            console.print("> ", end="")
        requests.put(None)
        while True:
            try:
                yield lines.get(timeout=timeout)
                break
            except Empty:
                yield None
