"""A progress bar for what takes longer than a few seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """On a terminal a bar; in a pipe nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, of: None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(title)
        yield lambda done, of: bar.update(task, completed=done, total=of)
