"""Messages of a pipeline with NCCL: on no communicator has a rank more than one peer."""

from __future__ import annotations

from collections import defaultdict

import pytest

from plait.cluster.mesh import LANES
from plait.comm.messages import lane


@pytest.mark.parametrize("ranks", range(2, 9))
def test_one_peer_on_each_lane(ranks: int) -> None:
    """Neighbours, and the last with the first, where stages go round."""
    peers: dict[tuple[int, int], set[int]] = defaultdict(set)
    for rank in range(ranks):
        for peer in {(rank + 1) % ranks, (rank - 1) % ranks}:
            assert lane(rank, peer) == lane(peer, rank) < LANES
            peers[rank, lane(rank, peer)].add(peer)
    assert all(len(found) == 1 for found in peers.values())
