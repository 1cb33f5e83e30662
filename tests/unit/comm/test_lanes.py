"""Messages of a pipeline with NCCL: on no communicator has a rank more than one peer."""

from __future__ import annotations

from collections import defaultdict

from plait.cluster.mesh import LANES
from plait.comm.messages import lane


def test_one_peer_on_each_lane():
    """Neighbours, and the last with the first, where stages go round."""
    for ranks in range(2, 9):
        peers: dict[tuple[int, int], set[int]] = defaultdict(set)
        for rank in range(ranks):
            for peer in {(rank + 1) % ranks, (rank - 1) % ranks}:
                assert lane(rank, peer) == lane(peer, rank) < LANES
                peers[rank, lane(rank, peer)].add(peer)
        assert all(len(found) == 1 for found in peers.values()), ranks
