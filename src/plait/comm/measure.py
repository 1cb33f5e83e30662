"""Times of collectives between the processes that run now, fitted to costs. Collective, and the only module here that looks at a clock.

Sizes are taken in turn, several rounds of all of them, and the median of a size is its time: a disturbance hits all sizes, not one. A time
is the slowest rank's. Rounds end at a budget, which the first rank watches for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from plait._torch import all_gather_single
from plait.cluster.mesh import Levels
from plait.comm.algorithms import exchange, reduce_scatter_steps, run
from plait.comm.buckets import Buckets, Flat
from plait.comm.links import Cost, GroupLinks, Level, fit
from plait.comm.transport import connect

SIZES = (4 * 1024, 64 * 1024, 1024**2, 8 * 1024**2)
"""Bytes of float32."""


def measure_group(axis: str, group: dist.ProcessGroup, levels: Levels | None, *, device: torch.device, seconds: float = 4.0) -> GroupLinks:
    """The costs of a group and of its levels. Collective over the group. `seconds` is about how long each level takes."""
    machines = levels.across.size() if levels is not None else 1
    whole = _level(group, device, seconds, far=machines)
    if levels is None:
        return GroupLinks(axis, 1, group.size(), whole)
    return GroupLinks(
        axis, machines, levels.inside.size(), whole, _level(levels.inside, device, seconds), _level(levels.across, device, seconds)
    )


def _level(group: dist.ProcessGroup, device: torch.device, seconds: float, *, far: int = 1) -> Level:
    ranks = group.size()
    way = connect(group, label="measurement", device=device)
    operations: dict[tuple[str, int], Callable[[], object]] = {}
    for nbytes in SIZES:
        numel = nbytes // 4 // ranks * ranks
        tensor, part = torch.zeros(numel, device=device), torch.zeros(numel // ranks, device=device)
        operations |= {
            ("all_reduce", nbytes): partial(dist.all_reduce, tensor, group=group),
            ("all_gather", nbytes): partial(all_gather_single, tensor, part, group=group),
            ("reduce_scatter", nbytes): partial(_reduce_scatter, part, tensor, group),
            ("exchange", nbytes): partial(_exchange, tensor, torch.empty_like(tensor), group, 1),
        }
        if far > 1:
            operations["far_exchange", nbytes] = partial(_exchange, tensor, torch.empty_like(tensor), group, ranks // far)
        if way.name == "shared-memory":
            operations["shared_memory", nbytes] = partial(_sum_bucket, way.buckets([Flat(torch.float32, ((numel,),))]))
    times: dict[tuple[str, int], list[float]] = {key: [] for key in operations}
    began, going = time.perf_counter(), torch.ones(1, device=device)
    while bool(going):
        for key, operation in operations.items():
            times[key].append(_timed(operation, group, device))
        going.fill_(time.perf_counter() - began < seconds)
        dist.broadcast(going, group_src=0, group=group)
    medians = _slowest({key: median(found[1:] or found) for key, found in times.items()}, group, device)
    names = dict.fromkeys(name for name, _ in operations)
    return Level(ranks, {name: _fit([(nbytes, t) for (n, nbytes), t in medians.items() if n == name]) for name in names})


def _reduce_scatter(part: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    run(reduce_scatter_steps(part, tensor, group))


def _exchange(outgoing: torch.Tensor, incoming: torch.Tensor, group: dist.ProcessGroup, distance: int) -> None:
    ranks, rank = group.size(), group.rank()
    for work in exchange(outgoing, incoming, group, to=(rank + distance) % ranks, source=(rank - distance) % ranks):
        work.wait()


def _sum_bucket(buckets: Buckets) -> None:
    buckets.start(0)
    buckets.finish(0)


def _timed(operation: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> float:
    dist.barrier(group=group)
    began = time.perf_counter()
    operation()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _slowest(times: dict[tuple[str, int], float], group: dist.ProcessGroup, device: torch.device) -> dict[tuple[str, int], float]:
    values = torch.tensor(list(times.values()), dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(times, values.tolist(), strict=True))


def _fit(samples: list[tuple[int, float]]) -> Cost:
    return fit([(nbytes, max(seconds, 1e-9)) for nbytes, seconds in samples])
