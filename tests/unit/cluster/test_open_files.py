"""A process with a low limit of open files is named on all ranks before any of them waits for it."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from plait.cluster import process_groups
from tests.pool import quick_starts


def join(connection: Connection, rank: int, limited: int, port: int) -> None:
    """Create the default group of two processes, one of which may open few files."""
    from plait.cluster import mesh
    from plait.errors import PlaitError

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if rank == limited:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
    try:
        mesh.join()
        connection.send("joined")
    except PlaitError as error:
        connection.send(str(error))


def messages(limited: int) -> list[str]:
    """What both processes say."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    context = quick_starts()
    found, processes = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=join, args=(theirs, rank, limited, port), daemon=True)
        process.start()
        processes.append((process, ours))
    for process, ours in processes:
        found.append(ours.recv() if ours.poll(120) else "it waits")
        process.kill()
        process.join()
    return found


@pytest.mark.parametrize("limited", [0, 1])
def test_low_limit_is_named_on_both_ranks(limited: int) -> None:
    first, second = messages(limited)
    assert first == second
    assert first.startswith(f"rank {limited}: ulimit -n: the process may have 24 open files")
    assert first.endswith("raise the limit on its machine: ulimit -n 4096")


def test_usual_limit() -> None:
    assert messages(-1) == ["joined", "joined"]


def open_all() -> list[int]:
    """Open files up to the limit."""
    descriptors = []
    with suppress(OSError):
        while True:
            descriptors.append(os.open(os.devnull, os.O_RDONLY))
    return descriptors


def test_exit_at_the_limit() -> None:
    """The end of a process that can open no further file does not fail."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, before[1]))
    descriptors = open_all()
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        process_groups.let_threads_finish()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in descriptors:
            os.close(descriptor)
