"""Several ranks on one GPU talk through host memory: every collective gives what gloo's own gives."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from plait.cluster.staged_group import StagedGroup
from tests.pool import Pool


def differences(rank: int, world: int, file: str) -> list[str]:
    """Names of the calls that gave something else. Runs in a worker."""
    group = StagedGroup(dist.FileStore(file, world), rank, world, timedelta(seconds=60))
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    whole = torch.arange(4.0 * world) + 10 * rank
    everyone = torch.stack([torch.arange(4.0 * world) + 10 * other for other in range(world)])

    def own() -> torch.Tensor:
        return whole.clone()

    summed, reduced = own(), torch.zeros(4)
    group.allreduce([summed]).wait()
    found["allreduce"] = summed, everyone.sum(0)
    options = dist.BroadcastOptions()
    options.rootRank = 1
    sent = own()
    group.broadcast([sent], options).wait()
    found["broadcast"] = sent, everyone[1]
    gathered = torch.zeros(world, 4 * world)
    group.all_gather_single(gathered, own()).wait()
    found["all_gather_single"] = gathered, everyone
    listed = [torch.zeros(4 * world) for _ in range(world)]
    group.allgather([listed], [own()]).wait()
    found["allgather"] = torch.stack(listed), everyone
    group.reduce_scatter_single(reduced, own()).wait()
    found["reduce_scatter_single"] = reduced.clone(), everyone.sum(0).view(world, 4)[rank]
    group.reduce_scatter([reduced], [list(own().split(4))]).wait()
    found["reduce_scatter"] = reduced, everyone.sum(0).view(world, 4)[rank]
    exchanged = torch.zeros(4 * world)
    group.all_to_all_single(exchanged, own(), [4] * world, [4] * world).wait()
    found["all_to_all_single"] = exchanged.view(world, 4), everyone.view(world, world, 4)[:, rank]
    columns = [torch.zeros(4) for _ in range(world)]
    group.alltoall(columns, list(own().split(4))).wait()
    found["alltoall"] = torch.stack(columns), everyone.view(world, world, 4)[:, rank]
    arrived = torch.zeros(4 * world)
    sending, receiving = group.send([own()], 1 - rank, 7), group.recv([arrived], 1 - rank, 7)
    receiving.wait()
    sending.wait()
    found["message"] = arrived, everyone[1 - rank]
    group.barrier().wait()
    return [name for name, (ours, theirs) in found.items() if not torch.equal(ours, theirs)]


def test_collectives(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, differences, str(tmp_path / "store")) == [[], []]
