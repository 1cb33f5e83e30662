"""Several ranks per GPU communicate through host memory, with the results of gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from plait._torch.groups import all_gather_single, reduce_scatter_single
from plait.cluster.staged_group import BACKEND, register_backend


def wrong_collectives(rank, world):
    """Return the names of functions of torch.distributed with other results.

    Runs on every rank.
    """
    register_backend()
    group = dist.new_group(backend=BACKEND)
    local = torch.arange(4.0 * world) + 10 * rank
    # [ranks, 4 * ranks], and the same as [source rank, target rank, 4].
    gathered = torch.stack([torch.arange(4.0 * world) + 10 * other for other in range(world)])
    columns = gathered.view(world, world, 4)
    summed = gathered.sum(0)
    scattered = columns.sum(0)[rank]
    exchanged = columns[:, rank]
    wrong = []

    def compare(name, actual, expected):
        if not torch.equal(actual.reshape(-1), expected.reshape(-1)):
            wrong.append(name)

    output = torch.zeros(world, 4 * world)
    all_gather_single(output, local, group=group)
    compare("all_gather_single", output, gathered)
    all_gather_single(output.zero_(), local, group=group, async_op=True).wait()
    compare("all_gather_single, asynchronous", output, gathered)
    output = torch.zeros(4)
    reduce_scatter_single(output, local.clone(), group=group)
    compare("reduce_scatter_single", output, scattered)

    output = local.clone()
    dist.all_reduce(output, group=group)
    compare("all_reduce", output, summed)
    output = local.clone()
    dist.broadcast(output, src=1, group=group)
    compare("broadcast", output, gathered[1])
    output = torch.zeros(4 * world)
    dist.all_to_all_single(output, local, group=group)
    compare("all_to_all_single", output, exchanged)
    outputs = [torch.zeros(4 * world) for _ in range(world)]
    dist.all_gather(outputs, local, group=group)
    compare("all_gather", torch.stack(outputs), gathered)
    outputs = [torch.zeros(4) for _ in range(world)]
    dist.all_to_all(outputs, list(local.split(4)), group=group)
    compare("all_to_all", torch.stack(outputs), exchanged)
    output = torch.zeros(4)
    dist.reduce_scatter(output, list(local.clone().split(4)), group=group)
    compare("reduce_scatter", output, scattered)

    received = torch.zeros(4 * world)
    sending = dist.isend(local, 1 - rank, group=group, tag=7)
    dist.recv(received, 1 - rank, group=group, tag=7)
    assert sending is not None
    sending.wait()
    compare("message", received, gathered[1 - rank])
    dist.barrier(group=group)
    objects: list[object] = [None] * world
    dist.all_gather_object(objects, rank, group=group)
    compare("all_gather_object", torch.tensor(objects), torch.arange(world))

    # DTensor uses these, which call the group from C++.
    output = functional.all_reduce(local, "sum", group)
    compare("functional all_reduce", output, summed)
    output = functional.all_gather_tensor(local, 0, group)
    compare("functional all_gather", output, gathered)
    output = functional.reduce_scatter_tensor(local, "sum", 0, group)
    compare("functional reduce_scatter", output, scattered)
    output = functional.all_to_all_single(local, None, None, group)
    compare("functional all_to_all", output, exchanged)
    outputs = functional.all_gather_into_tensor_coalesced([local, local + 1], group)
    expected = torch.stack([gathered, gathered + 1])
    compare("functional coalesced all_gather", torch.stack(outputs), expected)
    outputs = functional.reduce_scatter_tensor_coalesced([local, local + 1], "sum", [0, 0], group)
    expected = torch.stack([scattered, scattered + world])
    compare("functional coalesced reduce_scatter", torch.stack(outputs), expected)

    dist.destroy_process_group(group)
    return wrong


def test_every_collective_equals_gloo(pool):
    """torch calls collectives of the group from Python and from C++."""
    assert pool.run(2, wrong_collectives) == [[], []]
