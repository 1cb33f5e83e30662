"""Low limits of open files are reported on all ranks before any rank waits for another."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from plait.cluster import mesh, process_groups
from plait.cluster.open_files import check_open_files
from plait.cluster.topology import RankInfo
from plait.errors import InputError, PlaitError
from tests.pool import quick_starts


def join(connection, rank, limited, port):
    """Create the default group of two processes, one of which may open few files.

    Runs on every rank.
    """
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
    """Return the messages of both processes."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    context = quick_starts()
    processes = []
    for rank in range(2):
        receiver, sender = context.Pipe()
        process = context.Process(target=join, args=(sender, rank, limited, port), daemon=True)
        process.start()
        processes.append((process, receiver))
    received = []
    for process, receiver in processes:
        received.append(receiver.recv() if receiver.poll(120) else "it waits")
        process.kill()
        process.join()
    return received


def test_a_low_limit_of_the_rank_with_the_store_is_reported():
    first, second = messages(0)
    assert first == second
    assert first.startswith("rank 0: ulimit -n: the process may have 24 open files")
    assert first.endswith("raise the limit on its machine: ulimit -n 4096")


def test_a_low_limit_of_another_rank_is_reported_on_both():
    """Rank 1 does not wait for rank 0, so this process can be both, one after the other."""
    store = dist.HashStore()
    errors = []
    for rank, limit in ((1, limit_of_files(16)), (0, nullcontext())):
        with limit, pytest.raises(InputError) as error:
            check_open_files(store, RankInfo(rank, 2, rank, 2, 0))
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert errors[0].startswith("rank 1: ulimit -n: the process may have")


def test_the_advised_limit_suffices(monkeypatch):
    """Only an administrator can raise a hard limit."""
    with limit_of_files(16), pytest.raises(InputError) as error:
        check_open_files(dist.HashStore(), RankInfo())
    advised = int(str(error.value).rpartition("ulimit -n ")[2])
    with limit_of_files(advised):
        check_open_files(dist.HashStore(), RankInfo())

    # A process cannot raise its hard limit again after the test.
    with limit_of_files(16), monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: (16, 1024))
        with pytest.raises(InputError, match="its hard limit is 1,024, so set nofile in "):
            check_open_files(dist.HashStore(), RankInfo())


@contextmanager
def limit_of_files(limit):
    """Limit the numbers of files that this process may open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_exit_at_the_limit():
    """A process that can open no further file can still end."""
    descriptors = []
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
