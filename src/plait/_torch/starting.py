"""Patched behaviour of torch's elastic agent: how it starts the process of a rank."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

ProcessSource = Callable[
    [Sequence[str], Mapping[str, str], Sequence[IO[str] | None]], "subprocess.Popen[bytes] | None"
]
"""Function that returns the process of a rank, or None to have torch start one.

It receives the command, the environment, and the files for standard output and standard error.
"""


@contextmanager
def take_processes_from(process_source: ProcessSource) -> Iterator[None]:
    """Make the agent take processes from `process_source` inside the block.

    Args:
        process_source: Function that is called for every rank that the agent starts.
    """
    start = SubprocessHandler._popen

    def take_or_start(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        process = process_source(args, env, (handler._stdout, handler._stderr))
        return process or start(handler, args, env)

    SubprocessHandler._popen = take_or_start  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        SubprocessHandler._popen = start  # type: ignore[method-assign]
