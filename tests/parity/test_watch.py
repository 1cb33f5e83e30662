"""Published waits of a rank, and the hang that other ranks infer from them.

Waits are published through torch's record of collectives, and for shared memory by Plait itself.
"""

import time
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist

from plait._torch.groups import timeout_of
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.comm import hang, watch
from plait.comm.hang import FORWARD, read_board
from plait.comm.transport import connect
from plait.comm.watch import Watch


def wait_for(look, fragment):
    """Return the first result of `look` that contains the fragment, or is empty if it is.

    torch records the end of a collective a moment later.
    """
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        text = look()
        if text == fragment or (fragment and fragment in text):
            break
        time.sleep(0.01)
    return text


def description_of_the_hang(local):
    """Return what a rank would report if all timeouts were over, or an empty text."""
    # The interval between two looks has private names only. Without it a test would take minutes.
    local._looked = 0.0
    local.look(local.board)
    readings = {}
    for rank, peer in local._peers.items():
        reading = read_board(peer.board)
        if reading is not None:
            readings[rank] = reading
    expired = {rank: replace(reading, timeout_seconds=0.0) for rank, reading in readings.items()}
    hung = hang.find_hang(expired, time.monotonic())
    return "" if hung is None else hang.describe_cause(hung, readings)


def be_late(rank, world):
    """Return what rank 0 sees while rank 1 is late. Runs on every rank.

    Rank 1 joins gloo's all-reduce, and then a wait in shared memory, after rank 0 has looked.
    """
    mesh = build_mesh(Layout(dp_shard=world))
    group = mesh.group("dp_shard")
    assert group is not None
    # The group of the mesh is the default one, so barriers use another.
    barriers = dist.new_group()
    timeout = timeout_of(dist.group.WORLD)
    local = Watch()
    seen = {}
    # The intervals have no setting. With them the thread of the watch would look at its own times.
    with patch.object(watch, "_UNSEEN_SECONDS", 0.0), patch.object(watch, "LOOK_SECONDS", 3600.0):
        local.arm()
        assert timeout_of(dist.group.WORLD) == timeout + watch.LATER_ALONE_SECONDS
        assert local.board is not None and sorted(local._peers) == list(range(world))
        local.name_axes(mesh)
        local.progress(4, FORWARD)
        dist.barrier(group=barriers)

        if rank == 0:
            work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
            assert work is not None
            seen["gloo"] = wait_for(lambda: description_of_the_hang(local), "all-reduce")
            dist.barrier(group=barriers)
            work.wait()
        else:
            dist.barrier(group=barriers)
            dist.all_reduce(torch.ones(3), group=group)
        dist.barrier(group=barriers)
        if rank == 0:
            seen["ended"] = wait_for(lambda: description_of_the_hang(local), "")
        dist.barrier(group=barriers)

        transport = connect(
            group, label="dp_shard", device=torch.device("cpu"), requested="shared-memory"
        )
        assert transport.host is not None
        # Rank 1 is missing three times. A slow machine asks more often.
        answers = iter([[1], [1], [1], []])

        def missing_ranks():
            missing = next(answers, [])
            if missing and local.board.waiting_since:
                seen["shared memory"] = description_of_the_hang(local)
            return missing

        # Rank 1 continues to the barrier, and is late for this wait. The wait publishes to the
        # watch of the process, and only after a time for which it yields.
        if rank == 0:
            host = "plait.comm.shared_memory.host"
            with patch(f"{host}.WATCH", local), patch(f"{host}._YIELDING_SECONDS", 0.0):
                transport.host.wait(
                    missing_ranks, operation="all-gather", sequence=7, shape="[8] float32"
                )
        dist.barrier(group=barriers)
        assert local.board.waiting_since == 0
        local.disarm()
    return seen


def test_a_rank_that_is_late_is_named_with_the_collective(pool):
    seen = pool.run(2, be_late)[0]
    stuck = "rank 1 is stuck in step 4, forward: rank 0 has waited "
    gloo = seen["gloo"]
    assert gloo.startswith(stuck), gloo
    assert " in all-reduce over all ranks (dp_shard) (number " in gloo, gloo
    assert "[3] float32) at " in gloo and "test_watch.py:" in gloo, gloo
    assert seen["ended"] == ""
    memory = seen["shared memory"]
    assert memory.startswith(stuck), memory
    assert "in all-gather over dp_shard (number 7, [8] float32) at" in memory, memory
