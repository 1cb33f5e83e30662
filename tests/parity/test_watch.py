"""What a rank publishes of its waits, through torch's record of collectives and by itself in shared memory, and what is made of it."""

import time
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


def until(look, words):
    """What it says, once that has the words: torch notes the end of a collective a moment later."""
    ends = time.monotonic() + 10
    while (
        (text := look()) != words and (not words or words not in text) and time.monotonic() < ends
    ):
        time.sleep(0.01)
    return text


def late(rank, world):
    """Runs in a worker. Rank 1 does not take part until rank 0 has looked, first at gloo's all-reduce, then at one in shared memory."""
    mesh = build_mesh(Layout(dp_shard=world))
    group = mesh.group("dp_shard")
    assert group is not None
    beside = dist.new_group()  # the mesh's group is the default one
    before = timeout_of(dist.group.WORLD)
    own, found = Watch(), {}
    with patch.object(watch, "_UNSEEN_SECONDS", 0.0), patch.object(watch, "LOOK_SECONDS", 3600.0):
        own.arm()
        assert timeout_of(dist.group.WORLD) == before + watch.LATER_ALONE_SECONDS
        assert own.board is not None and sorted(own._peers) == list(range(world))
        own.name_axes(mesh)
        own.progress(4, FORWARD)
        dist.barrier(group=beside)

        def look():
            assert own.board is not None
            own._looked = 0.0
            own.look(own.board)
            readings = {
                other: reading
                for other, peer in own._peers.items()
                if (reading := read_board(peer.board)) is not None
            }
            later = {
                other: reading.__class__(**{**vars(reading), "timeout_seconds": 0.0})
                for other, reading in readings.items()
            }
            hung = hang.find_hang(later, time.monotonic())
            return hang.describe_cause(hung, readings) if hung is not None else ""

        if rank == 0:
            work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
            assert work is not None
            found["gloo"] = until(look, "all-reduce")
            dist.barrier(group=beside)
            work.wait()
        else:
            dist.barrier(group=beside)
            dist.all_reduce(torch.ones(3), group=group)
        dist.barrier(group=beside)
        found["ended"] = until(look, "") if rank == 0 else ""
        dist.barrier(group=beside)
        way = connect(
            group, label="dp_shard", device=torch.device("cpu"), requested="shared-memory"
        )
        assert way.host is not None
        answers = iter([[1], [1], [1], []])
        with patch("plait.comm.shared_memory.host.WATCH", own):

            def missing():
                answer = next(answers, [])  # a slow machine asks more often
                if answer and own.board is not None and own.board.waiting_since:
                    found["memory"] = look()
                return answer

            if rank == 0:  # rank 1 goes on to the barrier, late for this one
                with patch("plait.comm.shared_memory.host._YIELDING_SECONDS", 0.0):
                    way.host.wait(missing, operation="all-gather", sequence=7, shape="[8] float32")
        dist.barrier(group=beside)
        assert own.board.waiting_since == 0
        own.disarm()
    return found


def test_a_rank_that_is_late_is_named_with_the_collective(pool):
    first, _ = pool.run(2, late)
    stuck = "rank 1 is stuck in step 4, forward: rank 0 has waited "
    assert (
        first["gloo"].startswith(stuck)
        and " in all-reduce over all ranks (dp_shard) (number " in first["gloo"]
    ), first
    assert "[3] float32) at " in first["gloo"] and "test_watch.py:" in first["gloo"], first
    assert first["ended"] == ""
    assert (
        first["memory"].startswith(stuck)
        and "in all-gather over dp_shard (number 7, [8] float32) at" in first["memory"]
    ), first
