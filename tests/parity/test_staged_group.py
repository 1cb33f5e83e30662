"""Several ranks on one GPU talk through host memory: every collective gives what gloo's own gives."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from plait._torch.groups import all_gather_single, reduce_scatter_single
from plait.cluster.staged_group import BACKEND, register_backend


def calls_of_torch(rank, world):
    """Names of the functions of torch.distributed that gave something else. Runs in a worker."""
    register_backend()
    group = dist.new_group(backend=BACKEND)
    own = torch.arange(4.0 * world) + 10 * rank
    everyone = torch.stack([torch.arange(4.0 * world) + 10 * other for other in range(world)])
    columns = everyone.view(world, world, 4)
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def compare(name, result, expected):
        found[name] = result.reshape(-1), expected.reshape(-1)

    gathered, reduced = torch.zeros(world, 4 * world), torch.zeros(4)
    all_gather_single(gathered, own, group=group)
    compare("all_gather_single", gathered, everyone)
    reduce_scatter_single(reduced, own.clone(), group=group)
    compare("reduce_scatter_single", reduced, columns.sum(0)[rank])
    work = all_gather_single(gathered.zero_(), own, group=group, async_op=True)
    work.wait()
    compare("all_gather_single, asynchronous", gathered, everyone)

    summed, sent, exchanged = own.clone(), own.clone(), torch.zeros(4 * world)
    dist.all_reduce(summed, group=group)
    compare("all_reduce", summed, everyone.sum(0))
    dist.broadcast(sent, src=1, group=group)
    compare("broadcast", sent, everyone[1])
    dist.all_to_all_single(exchanged, own, group=group)
    compare("all_to_all_single", exchanged, columns[:, rank])
    listed = [torch.zeros(4 * world) for _ in range(world)]
    dist.all_gather(listed, own, group=group)
    compare("all_gather", torch.stack(listed), everyone)
    dist.all_to_all(
        listed := [torch.zeros(4) for _ in range(world)], list(own.split(4)), group=group
    )
    compare("all_to_all", torch.stack(listed), columns[:, rank])
    dist.reduce_scatter(reduced, list(own.clone().split(4)), group=group)
    compare("reduce_scatter", reduced, columns.sum(0)[rank])
    arrived = torch.zeros(4 * world)
    sending = dist.isend(own, 1 - rank, group=group, tag=7)
    dist.recv(arrived, 1 - rank, group=group, tag=7)
    assert sending is not None
    sending.wait()
    compare("message", arrived, everyone[1 - rank])
    dist.barrier(group=group)
    objects: list[object] = [None] * world
    dist.all_gather_object(objects, rank, group=group)
    compare("all_gather_object", torch.tensor(objects), torch.arange(world))

    # DTensor uses these, which call the group from C++.
    compare("functional all_reduce", functional.all_reduce(own, "sum", group), everyone.sum(0))
    compare("functional all_gather", functional.all_gather_tensor(own, 0, group), everyone)
    compare(
        "functional reduce_scatter",
        functional.reduce_scatter_tensor(own, "sum", 0, group),
        columns.sum(0)[rank],
    )
    compare(
        "functional all_to_all",
        functional.all_to_all_single(own, None, None, group),
        columns[:, rank],
    )
    several = functional.all_gather_into_tensor_coalesced([own, own + 1], group)
    compare(
        "functional coalesced all_gather",
        torch.stack(several),
        torch.stack([everyone, everyone + 1]),
    )
    several = functional.reduce_scatter_tensor_coalesced([own, own + 1], "sum", [0, 0], group)
    expected = columns.sum(0)[rank]
    compare(
        "functional coalesced reduce_scatter",
        torch.stack(several),
        torch.stack([expected, expected + world]),
    )
    dist.destroy_process_group(group)
    return [name for name, (ours, theirs) in found.items() if not torch.equal(ours, theirs)]


def test_calls_of_torch(pool):
    """torch reaches every collective of the group, from Python and from C++."""
    assert pool.run(2, calls_of_torch) == [[], []]
