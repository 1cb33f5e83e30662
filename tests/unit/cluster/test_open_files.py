"""A process with a low limit of open files is named on all ranks before any of them waits for it."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from plait.cluster import process_groups
from plait.cluster.open_files import check_open_files
from plait.cluster.topology import RankInfo
from plait.errors import InputError
from tests.pool import quick_starts


def join(connection, rank, limited, port):
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
        hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, hard_limit))
    try:
        mesh.join()
        connection.send("joined")
    except PlaitError as error:
        connection.send(str(error))


def messages(limited):
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


def test_low_limit_of_the_rank_with_the_store_is_named_on_both():
    first, second = messages(0)
    assert first == second
    assert first.startswith("rank 0: ulimit -n: the process may have 24 open files")
    assert first.endswith("raise the limit on its machine: ulimit -n 4096")


def test_low_limit_of_another_rank_is_named_on_both():
    """That rank waits for nobody, so one process can be both in turn."""
    store, said = dist.HashStore(), []
    for rank, limited in ((1, limit_of_files(16)), (0, nullcontext())):
        with limited, pytest.raises(InputError) as error:
            check_open_files(store, RankInfo(rank, 2, rank, 2, 0))
        said.append(str(error.value))
    assert said[0] == said[1] and said[0].startswith("rank 1: ulimit -n: the process may have")


def test_the_advised_limit_suffices(monkeypatch):
    """It is what the message says, or an administrator has to raise the hard limit."""
    with limit_of_files(16), pytest.raises(InputError) as error:
        check_open_files(dist.HashStore(), RankInfo())
    advised = int(str(error.value).rpartition("ulimit -n ")[2])
    with limit_of_files(advised):
        check_open_files(dist.HashStore(), RankInfo())

    with limit_of_files(16), monkeypatch.context() as changed:
        changed.setattr(resource, "getrlimit", lambda _: (16, 1024))
        with pytest.raises(InputError, match="its hard limit is 1,024, so set nofile in "):
            check_open_files(dist.HashStore(), RankInfo())


@contextmanager
def limit_of_files(limit):
    """Let this process open no file whose number is not below a limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_exit_at_the_limit():
    """The end of a process that can open no further file does not fail."""
    descriptors: list[int] = []
    used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    with limit_of_files(used + 8):
        with suppress(OSError):
            while True:
                descriptors.append(os.open(os.devnull, os.O_RDONLY))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                os.open(os.devnull, os.O_RDONLY)
            process_groups.let_threads_finish()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
