"""What a person types in a chat."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from io import TextIOWrapper
from queue import Empty, Queue
from threading import Thread

from rich.console import Console

SIGN_SECONDS = 20.0


def lines_said(first: bool, *, several: bool) -> Iterator[str | None]:
    """Lines of the person; "" on other processes, and at the end. Where others wait for the line
    (`several`), None now and then while there is none, since a wait that takes long is taken for a
    hang.
    """
    console = Console(stderr=True, highlight=False)
    while not first:
        yield ""
    # bytes of another encoding would end the thread that reads, or be no text
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    asked: Queue[None] = Queue()
    lines: Queue[str] = Queue()

    def read() -> None:
        while True:
            asked.get()
            lines.put(sys.stdin.readline().strip())

    Thread(target=read, daemon=True).start()
    while True:
        if sys.stdin.isatty():
            console.print("> ", end="")
        asked.put(None)
        while True:
            try:
                yield lines.get(timeout=SIGN_SECONDS if several else None)
                break
            except Empty:
                yield None
