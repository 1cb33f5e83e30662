"""The debug mode of collectives: ranks that issue different ones end with an error that names both lines, before anything is exchanged."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import plait
from plait.comm.failures import ComparedCollectives
from plait.errors import CommunicationError
from plait.losses.loss import WeightedLoss


def differ(rank, world):
    """Runs in a worker: each kind of difference in a group of its own, since a group's numbers go apart with it."""
    found = {}
    kinds = {
        "shape": lambda group: dist.all_reduce(torch.ones(3 + rank), group=group),
        "dtype": lambda group: dist.all_reduce(
            torch.ones(3, dtype=torch.float64 if rank else torch.float32), group=group
        ),
        "operation": lambda group: (
            dist.all_reduce(torch.ones(3), group=group)
            if rank
            else dist.broadcast(torch.ones(3), group=group, group_src=0)
        ),
    }
    for name, do in kinds.items():
        group = dist.new_group(timeout=timedelta(seconds=60))
        with ComparedCollectives():
            dist.all_reduce(torch.ones(2), group=group)  # the same
            try:
                do(group)
                found[name] = ""
            except CommunicationError as error:
                found[name] = str(error)
    group = dist.new_group(timeout=timedelta(seconds=60))
    first, second = torch.ones(3), torch.ones(3)
    with ComparedCollectives():
        try:
            if rank:
                dist.all_reduce(first, group=group)
                dist.all_reduce(second, group=group)
            else:
                dist.all_reduce(second, group=group)
                dist.all_reduce(first, group=group)
            found["order"] = ""
        except CommunicationError as error:
            found["order"] = str(error)
    return found


def test_a_difference_is_named_on_both_sides(pool):
    answers = pool.run(2, differ)
    assert answers[0] == answers[1]
    found = answers[0]
    assert all(
        text.startswith("collective ") and text.count("test_desync.py:") == 2
        for text in found.values()
    ), found
    assert (
        "rank 0 is at " in found["shape"]
        and "allreduce of [3] float32, rank 1 is at " in found["shape"]
        and "[4] float32" in found["shape"]
    )
    assert "[3] float64" in found["dtype"] and "broadcast of [3] float32" in found["operation"]
    assert found["order"].count("allreduce of [3] float32") == 2, "of one shape, at different lines"


def train(rank, world):
    """Runs in a worker: two steps of ZeRO 2 without and with the comparison."""
    losses = []
    for checked in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 2},
            "parallel": {"transport": "torch"},
            "faults": {"check_collectives": checked},
        }
        engine = plait.initialize(
            model,
            config,
            loss_fn=WeightedLoss(lambda out, batch: (out.square().sum(), len(out)), len),
        )
        losses.append(
            [float(engine.train_batch(torch.full((2, 6), 1.0 + rank)).loss) for _ in range(2)][-1]
        )
        engine.close()
    return losses


def test_a_run_without_a_difference_is_unchanged(pool):
    for without, compared in pool.run(2, train):
        assert without == compared
