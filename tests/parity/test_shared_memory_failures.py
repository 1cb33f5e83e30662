"""A rank that is killed or stuck in a shared-memory collective: the others name it, in time."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from plait.comm.all_reduce import Flat
from plait.comm.shared_memory.parameters import SharedParameters
from plait.comm.transport import connect
from plait.errors import CommunicationError
from tests.pool import quick_starts

CPU = torch.device("cpu")
GROUP_SECONDS = 2.0
OPERATIONS = {
    "all-gather": "all-gather",
    "shared parameters": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
}
"""Name of the operation in its error, keyed by the collective."""


def collectives(transport):
    """Return functions that run one collective each, by name."""
    buckets = transport.buckets([Flat(torch.float32, ((100_000,),))])
    parameters = SharedParameters(transport.host, [100_000], torch.float32)

    def all_gather():
        output = transport.all_gather.allocate((200_000,), dtype=torch.float32, device=CPU)
        transport.all_gather(output, output[:100_000], dist.group.WORLD)

    def shared_parameters():
        parameters.begin()
        parameters.finish()

    def reduce_scatter():
        allocate = transport.reduce_scatter.allocate
        inputs = allocate((200_000,), dtype=torch.float32, device=CPU).fill_(1)
        output = allocate((100_000,), dtype=torch.float32, device=CPU)
        transport.reduce_scatter(output, inputs, dist.group.WORLD, dist.ReduceOp.SUM)

    def all_reduce():
        buckets.start(0)
        buckets.finish(0)

    functions = (all_gather, shared_parameters, reduce_scatter, all_reduce)
    return dict(zip(OPERATIONS, functions, strict=True))


def work(rank, store, operation, failure, messages):
    """Take part twice. Then rank 1 fails, and rank 0 reports its error. Runs on every rank."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout
    )
    transport = connect(dist.group.WORLD, label="dp_shard", device=CPU, requested="shared-memory")
    collective = collectives(transport)[operation]
    collective()
    collective()
    if rank == 1:
        if failure == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    try:
        collective()
    except CommunicationError as error:
        messages.put(str(error))
    else:
        messages.put("no error")


def message_of_rank_0(tmp_path, operation, failure):
    """Run two processes of their own, because the pool's must not be killed."""
    context = quick_starts()
    messages = context.Queue()
    arguments = (str(tmp_path / "store"), operation, failure, messages)
    processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        return messages.get(timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.join()


def shared_files():
    folder = Path("/dev/shm")
    return {path.name for path in folder.glob("*plait*")} if folder.is_dir() else set()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_killed_rank_is_named_at_once(tmp_path, operation):
    before = shared_files()
    message = message_of_rank_0(tmp_path, operation, "dies")
    start = f"{OPERATIONS[operation]} over dp_shard: rank 1 (process "
    assert message.startswith(start), message
    # At the deadline the message would be another.
    assert "ended while rank 0 waited for it" in message
    assert shared_files() <= before, "no file is left"


def test_a_stuck_rank_is_named_at_the_deadline(tmp_path):
    message = message_of_rank_0(tmp_path, "all-reduce", "hangs")
    assert message.startswith("all-reduce over dp_shard: rank 0 waited 2 s for rank 1"), message
    assert "which is running but has not started this call" in message
