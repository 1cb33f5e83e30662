"""A rank that is killed, stuck or gone: the others end with an error that names it, in time, and nothing is left on the machine."""

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

GROUP_SECONDS = 2.0
WHERE = {
    "all-gather": "all-gather",
    "held once": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
}
"""What is done, to the operation that its error names."""


def gather(way):
    output = way.all_gather.allocate((200_000,), dtype=torch.float32, device=torch.device("cpu"))
    way.all_gather(output, output[:100_000], dist.group.WORLD)


def scatter(way):
    given = way.reduce_scatter.allocate(
        (200_000,), dtype=torch.float32, device=torch.device("cpu")
    ).fill_(1)
    output = way.reduce_scatter.allocate(
        (100_000,), dtype=torch.float32, device=torch.device("cpu")
    )
    way.reduce_scatter(output, given, dist.group.WORLD, dist.ReduceOp.SUM)


def work(rank, store, operation, victim_does, answers):
    """Rank 1 takes part twice and then fails; rank 0 says what it saw."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout
    )
    way = connect(
        dist.group.WORLD, label="dp_shard", device=torch.device("cpu"), requested="shared-memory"
    )
    buckets = way.buckets([Flat(torch.float32, ((100_000,),))])

    def reduce():
        buckets.start(0)
        buckets.finish(0)

    assert way.host is not None
    parameters = SharedParameters(way.host, [100_000], torch.float32)

    def meet():
        parameters.begin()
        parameters.finish()

    ways = {
        "all-gather": lambda: gather(way),
        "held once": meet,
        "reduce-scatter": lambda: scatter(way),
        "all-reduce": reduce,
    }
    once = ways[operation]
    once()
    once()
    if rank == 1:
        if victim_does == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    try:
        once()
    except CommunicationError as error:
        answers.put(str(error))
    else:
        answers.put("no error")


def run(tmp_path, operation, victim_does):
    context = quick_starts()
    answers = context.Queue()
    processes = [
        context.Process(
            target=work, args=(rank, str(tmp_path / "store"), operation, victim_does, answers)
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        found: str = answers.get(timeout=60)
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


def shared_files():
    return (
        {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()
    )


@pytest.mark.parametrize("operation", WHERE)
def test_a_killed_rank_is_named_at_once(tmp_path, operation):
    before = shared_files()
    text = run(tmp_path, operation, "dies")
    assert text.startswith(f"{WHERE[operation]} over dp_shard: rank 1 (process "), text
    assert "ended while rank 0 waited for it" in text, (
        "not only at the deadline, of which another sentence tells"
    )
    assert {name for name in shared_files() - before if "plait" in name} == set()


def test_a_stuck_rank_is_named_at_the_deadline(tmp_path):
    text = run(tmp_path, "all-reduce", "hangs")
    assert text.startswith(
        "all-reduce over dp_shard: rank 0 waited 2 s for rank 1, which is running but has not started this call"
    ), text
