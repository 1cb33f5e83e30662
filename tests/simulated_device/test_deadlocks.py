"""Calls that gloo would complete and NCCL would not are named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.simulated_device.deadlocks import stuck
from tests.simulated_device.pool import Deadlock, SimulatedPool


def journal(rank, *calls):
    """Return the journal of a rank.

    A call is a communicator, a list of (kind, peer), and optionally positions of other
    communicators that it waits for.
    """
    streams: dict[str, int] = {}
    counts: dict[str, int] = {}
    entries = []
    for communicator, parts, *after in calls:
        stream = streams.setdefault(communicator, len(streams) + 10)
        counts[communicator] = counts.get(communicator, 0) + 1
        positions = after[0] if after else {}
        entry = {
            "communicator": f"{communicator} [0 1]",
            "rank": rank,
            "stream": stream,
            "position": counts[communicator],
            "calls": [[kind, peer, 8] for kind, peer in parts],
            "after": {str(streams[name]): position for name, position in positions.items()},
        }
        entries.append(entry)
    return entries


def send(peer):
    return ("SEND", peer)


def recv(peer):
    return ("RECV", peer)


ALL = ("ALLREDUCE", -1)


def test_crossing_sends_on_one_communicator():
    """Both ranks send first, which ends if the calls are a group or have two communicators."""
    send_to_1 = ("a", [send(1)])
    receive_from_1 = ("a", [recv(1)])
    send_to_0 = ("a", [send(0)])
    receive_from_0 = ("a", [recv(0)])
    message = stuck([journal(0, send_to_1, receive_from_1), journal(1, send_to_0, receive_from_0)])
    call = "rank 0: SEND to rank 1 (number 1) on communicator a [0 1]"
    assert f"{call} waits for rank 1: RECV from rank 0 (number 1)" in message

    handshake = [journal(0, send_to_1, receive_from_1), journal(1, receive_from_0, send_to_0)]
    assert not stuck(handshake)
    group = [journal(0, ("a", [send(1), recv(1)])), journal(1, ("a", [send(0), recv(0)]))]
    assert not stuck(group)
    two_communicators = [
        journal(0, ("to 1", [send(1)]), ("to 0", [recv(1)])),
        journal(1, ("to 0", [send(0)]), ("to 1", [recv(0)])),
    ]
    assert not stuck(two_communicators)


def test_crossing_communicators():
    """The second call of each rank waits for its first."""
    crossed = [
        journal(0, ("a", [ALL]), ("b", [ALL], {"a": 1})),
        journal(1, ("b", [ALL]), ("a", [ALL], {"b": 1})),
    ]
    call = "ALLREDUCE on communicator a [0 1]"
    assert f"rank 0: {call} waits for rank 1: {call}, which has not begun" in stuck(crossed)
    unordered = [journal(0, ("a", [ALL]), ("b", [ALL])), journal(1, ("b", [ALL]), ("a", [ALL]))]
    assert not stuck(unordered)


def test_missing_and_different_partners():
    message = stuck([journal(0, ("a", [send(1)])), []])
    assert "waits for rank 1, which never calls RECV there" in message
    first = journal(0, ("a", [ALL]))
    assert "meets rank 1: BROADCAST" in stuck([first, journal(1, ("a", [("BROADCAST", -1)]))])
    longer = journal(1, ("a", [ALL]))
    longer[0]["calls"][0][2] = 16
    message = "of 8 bytes meets rank 1: ALLREDUCE on communicator a [0 1] of 16 bytes"
    assert message in stuck([first, longer])


def test_calls_behind_a_stuck_call_are_not_listed():
    journals = []
    for rank in (0, 1):
        receives = [("a", [recv(1 - rank)])] * 30
        journals.append(journal(rank, ("a", [send(1 - rank)]), *receives))
    assert len(stuck(journals).splitlines()) <= 8


def ring(rank, world, mode):
    """Send to the next rank and receive from the previous one. Runs on every rank."""
    outgoing = torch.full((4,), float(rank), device="cuda")
    received = torch.empty(4, device="cuda")
    target = (rank + 1) % world
    source = (rank - 1) % world
    if mode == "batched":
        send_call = dist.P2POp(dist.isend, outgoing, target)
        works = dist.batch_isend_irecv([send_call, dist.P2POp(dist.irecv, received, source)])
    elif mode == "handshake" and rank % 2:
        works = [dist.irecv(received, source), dist.isend(outgoing, target)]
    else:
        works = [dist.isend(outgoing, target), dist.irecv(received, source)]
    for work in works:
        work.wait()
    return received.tolist()


def never_answered(rank, world):
    """Runs on every rank."""
    x = torch.ones(4, device="cuda")
    if rank == 0:
        dist.recv(x, 1)
        x.tolist()


@pytest.mark.parametrize("world", [2, 4])
def test_a_ring(simulated, world):
    """gloo buffers messages that nobody receives yet, and NCCL does not."""
    message = "rank 0: SEND to rank 1 .* waits for rank 1: RECV from rank 0 .*, which has not begun"
    with pytest.raises(Deadlock, match=message):
        simulated.run(world, ring, "each sends first")
    expected = [[float((rank - 1) % world)] * 4 for rank in range(world)]
    assert simulated.run(world, ring, "batched") == expected
    assert simulated.run(world, ring, "handshake") == expected


def test_call_without_a_partner(device):
    """The error names the call, and is not the timeout of the group."""
    pool = SimulatedPool(SIMULATED_DEVICE_TIMEOUT="1")
    message = "rank 0: RECV from rank 1 .* waits for rank 1, which never calls SEND there"
    with pytest.raises(Deadlock, match=message):
        pool.run(2, never_answered)
    pool.close()
