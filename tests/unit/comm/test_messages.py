"""Messages of a pipeline with NCCL, where a communicator must connect a rank with one peer only."""

from plait.cluster.mesh import LANES
from plait.comm.messages import lane


def test_one_peer_per_lane():
    """The peers are neighbours, and the last rank and the first if stages wrap around."""
    for ranks in range(2, 9):
        for rank in range(ranks):
            peers = {(rank + 1) % ranks, (rank - 1) % ranks}
            lanes = {lane(rank, peer) for peer in peers}
            assert lanes == {lane(peer, rank) for peer in peers}
            assert len(lanes) == len(peers), (rank, ranks)
            assert max(lanes) < LANES
