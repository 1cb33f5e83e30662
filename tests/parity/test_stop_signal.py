"""All ranks learn of a signal that one rank received."""

import signal

import torch

from plait.train.loop import StopRequest


def requests(rank, world_size):
    """Return the shared request before and after rank 1 received SIGTERM. Runs on every rank."""
    stop = StopRequest()
    before = stop.shared(device=torch.device("cpu"))
    if rank == 1:
        stop._handle(signal.SIGTERM, None)  # what the signal module calls
    return [float(before), float(stop.shared(device=torch.device("cpu")))]


def test_every_rank_learns_of_a_signal_to_one(pool):
    assert pool.run(2, requests) == [[0.0, 15.0]] * 2
