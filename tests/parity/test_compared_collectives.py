"""`faults.check_collectives`: ranks that issue different collectives end with both lines named.

The collectives are compared before anything is exchanged.
"""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import plait
from plait.comm.failures import ComparedCollectives
from plait.errors import CommunicationError
from plait.losses.loss import WeightedLoss


def different_collectives(rank, world):
    """Return the message for each kind of difference. Runs on every rank."""

    def shape(group):
        dist.all_reduce(torch.ones(3 + rank), group=group)

    def dtype(group):
        dist.all_reduce(torch.ones(3).to(torch.float64 if rank else torch.float32), group=group)

    def operation(group):
        if rank:
            dist.all_reduce(torch.ones(3), group=group)
        else:
            dist.broadcast(torch.ones(3), group=group, group_src=0)

    def order(group):
        # Only the lines differ.
        if rank:
            dist.all_reduce(torch.ones(3), group=group)
            return
        dist.all_reduce(torch.ones(3), group=group)

    messages = {}
    for issue in (shape, dtype, operation, order):
        # Collectives of a group are numbered, and after a failure the ranks' numbers differ.
        group = dist.new_group(timeout=timedelta(seconds=60))
        messages[issue.__name__] = ""
        with ComparedCollectives():
            dist.all_reduce(torch.ones(2), group=group)
            try:
                issue(group)
            except CommunicationError as error:
                messages[issue.__name__] = str(error)
    return messages


def test_a_difference_is_named_on_both_sides(pool):
    messages, others = pool.run(2, different_collectives)
    assert messages == others
    for message in messages.values():
        assert message.startswith("collective ")
        assert message.count(f"{Path(__file__).name}:") == 2
    assert "rank 0 is at " in messages["shape"]
    assert "allreduce of [3] float32, rank 1 is at " in messages["shape"]
    assert "[4] float32" in messages["shape"]
    assert "[3] float64" in messages["dtype"]
    assert "broadcast of [3] float32" in messages["operation"]
    assert messages["order"].count("allreduce of [3] float32") == 2


def train(rank, world):
    """Return the second loss of ZeRO 2 without and with the comparison. Runs on every rank."""
    losses = []
    for compared in (False, True):
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 2},
            "parallel": {"transport": "torch"},
            "faults": {"check_collectives": compared},
        }
        engine = plait.initialize(
            nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)),
            config,
            loss_fn=WeightedLoss(lambda out, batch: (out.square().sum(), len(out)), len),
        )
        engine.train_batch(torch.full((2, 6), 1.0 + rank))
        losses.append(float(engine.train_batch(torch.full((2, 6), 1.0 + rank)).loss))
        engine.close()
    return losses


def test_a_run_without_a_difference_is_unchanged(pool):
    for uncompared, compared in pool.run(2, train):
        assert uncompared == compared


def exchange_rows(rank, world):
    """Return the rows that a rank receives from an uneven all-to-all. Runs on every rank."""
    sent = torch.full((3 - rank, 2), float(rank))
    received = torch.empty(2 if rank == 0 else 3, 2)
    sizes = {0: ([1, 1], [1, 2]), 1: ([2, 1], [1, 1])}[rank]
    with ComparedCollectives():
        dist.all_to_all_single(received, sent, *sizes)
    return received[:, 0].tolist()


def test_numbers_of_rows_in_an_all_to_all_may_differ(pool):
    """Experts on different processes exchange as many tokens as their routers chose."""
    assert pool.run(2, exchange_rows) == [[0, 1], [0, 0, 1]]
