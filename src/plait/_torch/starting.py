"""Processes of torch's elastic agent. `started_by` patches torch."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

Give = Callable[
    [Sequence[str], Mapping[str, str], Sequence[IO[str] | None]], "subprocess.Popen[bytes] | None"
]
"""Arguments, environment, and files for standard output and error to a process; None to have it
started.
"""


@contextmanager
def started_by(give: Give) -> Iterator[None]:
    """The agent asks `give` for the process of a rank before it starts one itself."""
    before = SubprocessHandler._popen

    def popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        return give(args, env, (handler._stdout, handler._stderr)) or before(handler, args, env)

    SubprocessHandler._popen = popen  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        SubprocessHandler._popen = before  # type: ignore[method-assign]
