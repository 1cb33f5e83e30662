"""NCCL's order of calls: what gloo would carry out and NCCL would not is found and named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.simulated_device.deadlocks import stuck
from tests.simulated_device.pool import Deadlock, SimulatedPool


def journal(rank, *calls):
    """Of calls (communicator, list of (kind, peer), {communicator: position} that were waited for)."""
    streams: dict[str, int] = {}
    counts: dict[str, int] = {}
    lines = []
    for communicator, parts, *after in calls:
        stream = streams.setdefault(communicator, len(streams) + 10)
        counts[communicator] = counts.get(communicator, 0) + 1
        waited = {
            str(streams[name]): position for name, position in (after[0] if after else {}).items()
        }
        made = [[kind, peer, 8] for kind, peer in parts]
        name = f"{communicator} [0 1]"
        lines.append(
            {
                "communicator": name,
                "rank": rank,
                "stream": stream,
                "position": counts[communicator],
                "calls": made,
                "after": waited,
            }
        )
    return lines


def send(peer):
    return ("SEND", peer)


def recv(peer):
    return ("RECV", peer)


ALL = ("ALLREDUCE", -1)


def test_crossing_sends_on_one_communicator():
    """Both send first; in one group, or in the order of a handshake, they do not wait for each other."""
    both = [journal(rank, ("a", [send(1 - rank)]), ("a", [recv(1 - rank)])) for rank in (0, 1)]
    told = stuck(both)
    assert (
        "rank 0: SEND to rank 1 (number 1) on communicator a [0 1] waits for rank 1: RECV from rank 0 (number 1)"
        in told
    )
    assert not stuck([journal(rank, ("a", [send(1 - rank), recv(1 - rank)])) for rank in (0, 1)])
    assert not stuck(
        [
            journal(0, ("a", [send(1)]), ("a", [recv(1)])),
            journal(1, ("a", [recv(0)]), ("a", [send(0)])),
        ]
    )
    assert not stuck(
        [
            journal(rank, (f"to{1 - rank}", [send(1 - rank)]), (f"to{rank}", [recv(1 - rank)]))
            for rank in (0, 1)
        ]
    )


def test_what_streams_wait_for():
    """Two communicators; the second call of each rank waits for its first."""
    crossed = [
        journal(0, ("a", [ALL]), ("b", [ALL], {"a": 1})),
        journal(1, ("b", [ALL]), ("a", [ALL], {"b": 1})),
    ]
    assert (
        "rank 0: ALLREDUCE on communicator a [0 1] waits for rank 1: ALLREDUCE on communicator a [0 1], which has not begun"
        in stuck(crossed)
    )
    assert not stuck(
        [journal(0, ("a", [ALL]), ("b", [ALL])), journal(1, ("b", [ALL]), ("a", [ALL]))]
    )


def test_partners():
    """Missing, of another kind, of another size."""
    assert "waits for rank 1, which never calls RECV there" in stuck(
        [journal(0, ("a", [send(1)])), []]
    )
    assert "meets rank 1: BROADCAST" in stuck(
        [journal(0, ("a", [ALL])), journal(1, ("a", [("BROADCAST", -1)]))]
    )
    longer = journal(1, ("a", [ALL]))
    longer[0]["calls"][0][2] = 16
    assert "of 8 bytes meets rank 1: ALLREDUCE on communicator a [0 1] of 16 bytes" in stuck(
        [journal(0, ("a", [ALL])), longer]
    )


def test_names_are_told_once():
    """Many calls behind one that is stuck are not listed."""
    ring = [
        journal(rank, ("a", [send(1 - rank)]), *[("a", [recv(1 - rank)])] * 30) for rank in (0, 1)
    ]
    assert len(stuck(ring).splitlines()) <= 8


def ring(rank, world, way):
    """Every rank sends to the next. Runs in a worker."""
    mine, found = torch.full((4,), float(rank), device="cuda"), torch.empty(4, device="cuda")
    to, source = (rank + 1) % world, (rank - 1) % world
    if way == "batched":
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, to), dist.P2POp(dist.irecv, found, source)]
        )
    else:
        works = [dist.isend(mine, to), dist.irecv(found, source)]
    for work in works:
        work.wait()
    return found.tolist()


def handshake(rank, world):
    """Even ranks send first, odd ranks receive first. Runs in a worker."""
    mine, found = torch.full((4,), float(rank), device="cuda"), torch.empty(4, device="cuda")
    to, source = (rank + 1) % world, (rank - 1) % world
    works = (
        [dist.isend(mine, to), dist.irecv(found, source)]
        if rank % 2 == 0
        else [dist.irecv(found, source), dist.isend(mine, to)]
    )
    for work in works:
        work.wait()
    return found.tolist()


def never_answered(rank, world):
    """Runs in a worker."""
    x = torch.ones(4, device="cuda")
    if rank == 0:
        dist.recv(x, 1)
        x.tolist()


@pytest.mark.parametrize("world", [2, 4])
def test_a_ring(simulated, world):
    """gloo buffers what was sent, NCCL does not."""
    expected = [[float((rank - 1) % world)] * 4 for rank in range(world)]
    with pytest.raises(
        Deadlock,
        match="rank 0: SEND to rank 1 .* waits for rank 1: RECV from rank 0 .*, which has not begun",
    ):
        simulated.run(world, ring, "each sends first")
    assert simulated.run(world, ring, "batched") == expected
    assert simulated.run(world, handshake) == expected


def test_a_call_without_a_partner(device):
    """It ends with what waited, not at the timeout of the group."""
    pool = SimulatedPool(SIMULATED_DEVICE_TIMEOUT="1")
    with pytest.raises(
        Deadlock, match="rank 0: RECV from rank 1 .* waits for rank 1, which never calls SEND there"
    ):
        pool.run(2, never_answered)
    pool.close()
