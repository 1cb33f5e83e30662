"""Times of collectives between the processes that run now, fitted to costs. Collective.

Sizes are taken in turn, several rounds of all of them: a disturbance hits all sizes, not one. A
time is the slowest rank's, and the median of the rounds counts. Rounds end at a budget, which the
first rank watches for all; on slow links the largest sizes are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from random import Random
from typing import TypeVar, cast, get_args

import torch
import torch.distributed as dist

from plait._torch.flat_collectives import all_gather_single
from plait.cluster import accelerator
from plait.cluster.mesh import Levels
from plait.comm.algorithms import Name, exchange, reduce_scatter_steps, run, sum_over
from plait.comm.buckets import Buckets, Flat
from plait.comm.choose import QUANTISED
from plait.comm.compress import QuantisedBuckets
from plait.comm.links import GroupLinks, Level, measured_cost
from plait.comm.quantise import BLOCK
from plait.comm.transport import connect
from plait.units import KIB, MIB

SIZES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
"""Bytes of float32."""
_SELDOM_BYTES = 16 * MIB
_SELDOM = 3
"""From this size on only every third round has it: it takes most of the time, and a long time is
disturbed less.
"""
_FEWEST_SIZES = 4
"""Up to a MiB: what is smaller passes through the buffers of switches and rate limits as if the
link had no rate.
"""
_SHARE_OF_A_ROUND = 0.6
"""A round of all sizes may take this part of the time."""
_MOST_ROUNDS = 20
LEAST_COMPARED = 8
_MOST_COMPARED = 100
"""Rounds of algorithms that are compared at one size."""

Operation = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)
Operations = Callable[[int], dict[str, Operation]]
"""Of a number of bytes: name to what is timed. Collective to make and to call."""


def measure_group(
    axis: str,
    group: dist.ProcessGroup,
    levels: Levels | None,
    *,
    machines: int = 1,
    device: torch.device,
    seconds: float = 4.0,
) -> GroupLinks:
    """The costs of every operation and of every all-reduce algorithm, also in the intra-node and
    inter-node groups. Collective over the group, which spans `machines`, equally many ranks on
    each. `seconds` is about how long each level takes.
    """
    basic = partial(_basic, group, device, far=machines)
    ways = ways_of(group, levels, device=device, shared_memory=True, lossy=True)
    whole = _level(lambda nbytes: basic(nbytes) | ways(nbytes), group, device, seconds)
    if levels is None:
        return GroupLinks(axis, machines, group.size() // machines, whole)
    inside, across = (
        _level(partial(_basic, level, device), level, device, seconds, most_rounds=_MOST_ROUNDS)
        for level in (levels.inside, levels.across)
    )
    return GroupLinks(axis, machines, levels.inside.size(), whole, inside, across)


def measure_ways(
    axis: str,
    group: dist.ProcessGroup,
    levels: Levels | None,
    *,
    machines: int = 1,
    device: torch.device,
    seconds: float,
    shared_memory: bool = False,
    largest_bytes: int = SIZES[-1],
) -> GroupLinks:
    """Only the uncompressed algorithms, for a choice between them; `shared_memory` has that among
    them where there is some. No tensor is larger than `largest_bytes`, unless two sizes need it.
    Collective over the group, about `seconds`.
    """
    ways = ways_of(group, levels, device=device, shared_memory=shared_memory, lossy=False)
    whole = _level(
        ways, group, device, seconds, most_rounds=_MOST_ROUNDS, largest_bytes=largest_bytes
    )
    return GroupLinks(axis, machines, group.size() // machines, whole)


def compare_ways(
    names: Sequence[str],
    nbytes: int,
    group: dist.ProcessGroup,
    levels: Levels | None,
    *,
    device: torch.device,
    seconds: float,
    shared_memory: bool = False,
) -> dict[str, float]:
    """Seconds of some uncompressed all-reduce algorithms for a tensor of `nbytes`, interleaved.
    Collective over the group; about `seconds`, or what a few rounds take.
    """
    ways = ways_of(group, levels, device=device, shared_memory=shared_memory, lossy=False)(nbytes)
    chosen = {name: ways[name] for name in names}
    return _rounds(chosen, group, device, seconds, least=LEAST_COMPARED, most=_MOST_COMPARED)


def probe(
    group: dist.ProcessGroup, sizes: tuple[int, ...], *, device: torch.device, times: int = 5
) -> list[float]:
    """Seconds of an all-reduce of each size, from `times` after a first one, which opens
    connections. Collective over the group; milliseconds on links that are not slow.
    """
    found = []
    for nbytes in sizes:
        operation = partial(
            dist.all_reduce,
            torch.zeros(nbytes // 4, dtype=torch.float32, device=device),
            group=group,
        )
        found.append([_timed(operation, group, device) for _ in range(times + 1)][1:])
    return _typical(found, group, device)


def ways_of(
    group: dist.ProcessGroup,
    levels: Levels | None,
    *,
    device: torch.device,
    shared_memory: bool,
    lossy: bool,
) -> Operations:
    """What sums a tensor over the group, by the names of `comm.choose`."""
    names = [
        name
        for name in cast(tuple[Name, ...], get_args(Name))
        if name != "hierarchical" or levels is not None
    ]
    host = connect(group, label="measurement", device=device) if shared_memory else None

    def of(nbytes: int) -> dict[str, Operation]:
        tensor = torch.zeros(_numel(nbytes, group), dtype=torch.float32, device=device)
        found: dict[str, Operation] = {
            name: partial(_sum, tensor, group, name, levels) for name in names
        }
        if host is not None and host.name == "shared-memory":
            found["shared-memory"] = partial(
                _sum_bucket, host.buckets([Flat(torch.float32, ((tensor.numel(),),))])
            )
        if lossy:
            flat = Flat(torch.float32, ((max(1, tensor.numel() // BLOCK), BLOCK),))
            for bits in QUANTISED:
                found[f"int{bits}"] = partial(
                    _sum_bucket, QuantisedBuckets(group, [flat], device, bits=bits, feedback=True)
                )
        return found

    return of


def _basic(
    group: dist.ProcessGroup, device: torch.device, nbytes: int, *, far: int = 1
) -> dict[str, Operation]:
    ranks = group.size()
    numel = _numel(nbytes, group)
    tensor, part = (
        torch.zeros(count, dtype=torch.float32, device=device) for count in (numel, numel // ranks)
    )
    found: dict[str, Operation] = {
        "all_reduce": partial(dist.all_reduce, tensor, group=group),
        "all_gather": partial(all_gather_single, tensor, part, group=group),
        "reduce_scatter": partial(_reduce_scatter, part, tensor, group),
        "exchange": partial(_exchange, tensor, torch.empty_like(tensor), group, 1),
    }
    if far > 1:
        found["far_exchange"] = partial(
            _exchange, tensor, torch.empty_like(tensor), group, ranks // far
        )
    return found


def _numel(nbytes: int, group: dist.ProcessGroup) -> int:
    return max(1, nbytes // 4 // group.size()) * group.size()


def _level(
    of: Operations,
    group: dist.ProcessGroup,
    device: torch.device,
    seconds: float,
    *,
    most_rounds: int | None = None,
    largest_bytes: int = SIZES[-1],
) -> Level:
    began = time.perf_counter()
    smallest = of(SIZES[0])
    sizes = _affordable(
        group, device, seconds, operations=len(smallest), largest_bytes=largest_bytes
    )
    operations = {
        (name, nbytes): operation for nbytes in sizes for name, operation in of(nbytes).items()
    }
    seldom = frozenset(key for key in operations if key[1] >= _SELDOM_BYTES)
    left = seconds - (time.perf_counter() - began)
    typical = _rounds(operations, group, device, left, most=most_rounds, seldom=seldom)
    return Level(
        group.size(),
        {
            name: measured_cost(
                [
                    (nbytes, max(taken, 1e-9))
                    for (other, nbytes), taken in typical.items()
                    if other == name
                ]
            )
            for name in smallest
        },
    )


def _rounds(
    operations: Mapping[Key, Operation],
    group: dist.ProcessGroup,
    device: torch.device,
    seconds: float,
    *,
    least: int = 1,
    most: int | None = None,
    seldom: frozenset[Key] = frozenset(),
) -> dict[Key, float]:
    """Typical seconds of each. Every round takes all in an order of its own (the same on all
    ranks), because one leaves traces for the next. The first rank watches the time for all. A first
    round is not counted where there are others.
    """
    times: dict[Key, list[float]] = {key: [] for key in operations}
    keys = list(operations)
    going = torch.ones(1, device=device)
    rounds = 0
    began = time.perf_counter()
    while bool(going):
        for key in Random(rounds).sample(keys, len(keys)):
            if key not in seldom or rounds % _SELDOM == 0:
                times[key].append(_timed(operations[key], group, device))
        rounds += 1
        going.fill_(
            rounds < least
            or (time.perf_counter() - began < seconds and (most is None or rounds < most))
        )
        dist.broadcast(going, group_src=0, group=group)
    return dict(
        zip(
            keys,
            _typical([found[1:] or found for found in times.values()], group, device),
            strict=True,
        )
    )


def _affordable(
    group: dist.ProcessGroup,
    device: torch.device,
    seconds: float,
    *,
    operations: int,
    largest_bytes: int,
) -> tuple[int, ...]:
    """The smallest sizes, so many that a round of all operations takes its share of the time or
    less, as the all-reduce of one MiB lets expect. The same on all ranks.
    """
    small, large = probe(group, (SIZES[0], MIB), device=device, times=1)
    per_byte = max(0.0, large - small) / (MIB - SIZES[0])
    chosen = 0
    expected = 0.0
    for nbytes in SIZES:
        expected += operations * (small + per_byte * nbytes)
        chosen += nbytes <= largest_bytes and expected <= _SHARE_OF_A_ROUND * seconds
    return SIZES[: max(chosen, _FEWEST_SIZES)]


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup, name: Name, levels: Levels | None) -> None:
    run(sum_over(tensor, group, algorithm=name, levels=levels))


def _reduce_scatter(part: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    run(reduce_scatter_steps(part, tensor, group))


def _exchange(
    outgoing: torch.Tensor, incoming: torch.Tensor, group: dist.ProcessGroup, distance: int
) -> None:
    ranks = group.size()
    rank = group.rank()
    for work in exchange(
        outgoing, incoming, group, to=(rank + distance) % ranks, source=(rank - distance) % ranks
    ):
        work.wait()


def _sum_bucket(buckets: Buckets) -> None:
    buckets.start(0)
    buckets.finish(0)


def _timed(operation: Operation, group: dist.ProcessGroup, device: torch.device) -> float:
    dist.barrier(group=group)
    began = time.perf_counter()
    operation()
    accelerator.synchronize(device)
    return time.perf_counter() - began


def _typical(
    times: Sequence[Sequence[float]], group: dist.ProcessGroup, device: torch.device
) -> list[float]:
    """Of each list, equally long on all ranks: the median of the slowest rank's."""
    values = torch.tensor(
        [taken for one in times for taken in one], dtype=torch.float64, device=device
    )
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return [float(one.quantile(0.5)) for one in values.split([len(one) for one in times])]
