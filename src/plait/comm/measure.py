"""Measurement of collectives between the running processes, and costs fitted to the times.

All functions here are collective.

Note [Rounds of a measurement]
    All sizes are measured in every round, so that a disturbance affects all sizes and not one. Each
    round has a different order, because an operation influences the next one. In each round, the
    time of an operation is that of the slowest rank. The result is the median over the rounds. The
    first rank ends the measurement for all ranks when the time is over. On slow links the largest
    sizes are left out.

At the start of a run `find_links` measures the costs of its links, or reads them from the file of
an earlier run. Stored costs are used if they were measured by the same ranks on the same machines,
and if a probe of two sizes agrees with them up to the factor AGREEMENT. Otherwise the links are
measured again. All ranks of the group use the result of the first rank. `refine` then compares the
best algorithms at the message size of the run.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import TypeVar, cast, get_args

import torch
import torch.distributed as dist

from plait._torch.groups import all_gather_single
from plait.cluster import accelerator
from plait.cluster.mesh import Levels
from plait.cluster.small_messages import all_gather_objects, broadcast_object
from plait.comm.all_reduce import Buckets, Flat, Name, exchange, reduce_scatter_steps, run, sum_over
from plait.comm.choose import (
    AlgorithmChoice,
    Cost,
    GroupLinks,
    Level,
    algorithm_seconds,
    load_with_facts,
    measured_cost,
    refined,
    save,
)
from plait.comm.compress import QuantisedBuckets
from plait.comm.quantise import BLOCK, Bits
from plait.comm.transport import connect
from plait.errors import InputError
from plait.sizes import KIB, MIB, format_bytes

SIZES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
"""Bytes of the measured float32 tensors."""
_BITS: tuple[Bits, ...] = (8, 4)
"""Bits per element of the compressed sums that are measured."""
_RARE_BYTES = 16 * MIB
"""Size from which an operation is measured only in some rounds.

Large tensors take most of the time, and long times vary less.
"""
_RARE_INTERVAL = 3
"""Number of rounds per measurement of a large tensor."""
_FEWEST_SIZES = 4
"""Number of sizes that are always measured, so that the largest of them is one MiB.

Smaller tensors fit into the buffers of switches and rate limiters, and would hide the bandwidth.
"""
_ROUND_FRACTION = 0.6
"""Fraction of the time that one round of all sizes may take."""
_MOST_ROUNDS = 20
LEAST_COMPARED = 8
"""Fewest rounds of a comparison at one size."""
_MOST_COMPARED = 100
"""Most rounds of a comparison at one size."""

Operation = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)
Operations = Callable[[int], dict[str, Operation]]
"""Function that returns named operations for a number of bytes.

Creating and calling the operations is collective.
"""
_LONGEST_REFINEMENT = 4.0
"""Multiple of the requested time that the fewest rounds of a comparison may take."""
AGREEMENT = 2.0
"""Largest ratio between the times of a probe and of a stored measurement that counts as equal."""


def measure_group(
    axis: str,
    group: dist.ProcessGroup,
    levels: Levels | None,
    *,
    machines: int = 1,
    device: torch.device,
    seconds: float = 4.0,
) -> GroupLinks:
    """Return the costs of every operation and of every all-reduce algorithm. Collective.

    Args:
        axis: Name of the mesh dimension.
        group: The process group, with equally many ranks on each machine.
        levels: Groups inside and across machines, whose operations are also measured, or None.
        machines: Number of machines of the group.
        device: Device of the tensors.
        seconds: Approximate time per level.
    """
    algorithms = all_reduce_operations(group, levels, device=device, shared_memory=True, lossy=True)

    def operations(nbytes: int) -> dict[str, Operation]:
        return _basic_operations(group, device, nbytes, machines=machines) | algorithms(nbytes)

    group_level = _measure_level(operations, group, device, seconds)
    if levels is None:
        return GroupLinks(axis, machines, group.size() // machines, group_level)
    inside, across = (
        _measure_level(
            partial(_basic_operations, level, device),
            level,
            device,
            seconds,
            most_rounds=_MOST_ROUNDS,
        )
        for level in (levels.inside, levels.across)
    )
    return GroupLinks(axis, machines, levels.inside.size(), group_level, inside, across)


def measure_algorithms(
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
    """Return the costs of the uncompressed all-reduce algorithms. Collective.

    Args:
        axis: Name of the mesh dimension.
        group: The process group, with equally many ranks on each machine.
        levels: Groups inside and across machines.
        machines: Number of machines of the group.
        device: Device of the tensors.
        seconds: Approximate time.
        shared_memory: Whether to also measure shared memory, if the ranks have it.
        largest_bytes: Limit of the size of tensors. Larger ones are used if too few sizes remain.
    """
    algorithms = all_reduce_operations(
        group, levels, device=device, shared_memory=shared_memory, lossy=False
    )
    group_level = _measure_level(
        algorithms, group, device, seconds, most_rounds=_MOST_ROUNDS, largest_bytes=largest_bytes
    )
    return GroupLinks(axis, machines, group.size() // machines, group_level)


def compare_algorithms(
    names: Sequence[str],
    nbytes: int,
    group: dist.ProcessGroup,
    levels: Levels | None,
    *,
    device: torch.device,
    seconds: float,
    shared_memory: bool = False,
) -> dict[str, float]:
    """Return the seconds of uncompressed all-reduce algorithms at one size. Collective.

    Args:
        names: Names of the algorithms.
        nbytes: Size of the float32 tensor.
        group: The process group.
        levels: Groups inside and across machines.
        device: Device of the tensors.
        seconds: Approximate time. The minimum number of rounds may take longer.
        shared_memory: Whether `names` may include shared memory.
    """
    algorithms = all_reduce_operations(
        group, levels, device=device, shared_memory=shared_memory, lossy=False
    )
    operations = algorithms(nbytes)
    compared = {name: operations[name] for name in names}
    return _measure_rounds(
        compared, group, device, seconds, least=LEAST_COMPARED, most=_MOST_COMPARED
    )


def probe(
    group: dist.ProcessGroup, sizes: tuple[int, ...], *, device: torch.device, times: int = 5
) -> list[float]:
    """Return the seconds of an all-reduce for each size. Collective.

    A probe takes milliseconds unless the links are slow.

    Args:
        group: The process group.
        sizes: Sizes of the float32 tensors in bytes.
        device: Device of the tensors.
        times: Number of measurements per size, after a first one that opens connections.
    """
    samples = []
    for nbytes in sizes:
        tensor = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
        operation = partial(dist.all_reduce, tensor, group=group)
        samples.append([_timed(operation, group, device) for _ in range(times + 1)][1:])
    return _median_of_slowest(samples, group, device)


def all_reduce_operations(
    group: dist.ProcessGroup,
    levels: Levels | None,
    *,
    device: torch.device,
    shared_memory: bool,
    lossy: bool,
) -> Operations:
    """Return the operations that sum a tensor over a group, by the names of `comm.choose`.

    Args:
        group: The process group.
        levels: Groups inside and across machines.
        device: Device of the tensors.
        shared_memory: Whether shared memory is included, if the ranks have it.
        lossy: Whether compressed sums are included.
    """
    names = list(cast(tuple[Name, ...], get_args(Name)))
    if levels is None:
        names.remove("hierarchical")
    transport = None
    if shared_memory:
        transport = connect(group, label="measurement", device=device)

    def operations(nbytes: int) -> dict[str, Operation]:
        tensor = torch.zeros(_numel(nbytes, group), dtype=torch.float32, device=device)
        sums: dict[str, Operation] = {
            name: partial(_sum, tensor, group, name, levels) for name in names
        }
        if transport is not None and transport.name == "shared-memory":
            flat = Flat(torch.float32, ((tensor.numel(),),))
            sums["shared-memory"] = partial(_sum_bucket, transport.buckets([flat]))
        if lossy:
            # Only matrices are compressed.
            flat = Flat(torch.float32, ((max(1, tensor.numel() // BLOCK), BLOCK),))
            for bits in _BITS:
                buckets = QuantisedBuckets(group, [flat], device, bits=bits, feedback=True)
                sums[f"int{bits}"] = partial(_sum_bucket, buckets)
        return sums

    return operations


def _basic_operations(
    group: dist.ProcessGroup, device: torch.device, nbytes: int, *, machines: int = 1
) -> dict[str, Operation]:
    """Return the operations of `comm.choose.Level` for a tensor of `nbytes`."""
    ranks = group.size()
    numel = _numel(nbytes, group)
    tensor = torch.zeros(numel, dtype=torch.float32, device=device)
    shard = torch.zeros(numel // ranks, dtype=torch.float32, device=device)
    operations: dict[str, Operation] = {
        "all_reduce": partial(dist.all_reduce, tensor, group=group),
        "all_gather": partial(all_gather_single, tensor, shard, group=group),
        "reduce_scatter": partial(_reduce_scatter, shard, tensor, group),
        "exchange": partial(_exchange, tensor, torch.empty_like(tensor), group, 1),
    }
    if machines > 1:
        operations["far_exchange"] = partial(
            _exchange, tensor, torch.empty_like(tensor), group, ranks // machines
        )
    return operations


def _numel(nbytes: int, group: dist.ProcessGroup) -> int:
    """Return the number of float32 elements in about `nbytes`, divisible by the number of ranks."""
    return max(1, nbytes // 4 // group.size()) * group.size()


def _measure_level(
    operations: Operations,
    group: dist.ProcessGroup,
    device: torch.device,
    seconds: float,
    *,
    most_rounds: int | None = None,
    largest_bytes: int = SIZES[-1],
) -> Level:
    """Measure operations at all affordable sizes and fit their costs."""
    began = time.perf_counter()
    names = list(operations(SIZES[0]))
    sizes = _affordable_sizes(
        group, device, seconds, operations=len(names), largest_bytes=largest_bytes
    )
    measured: dict[tuple[str, int], Operation] = {}
    for nbytes in sizes:
        for name, operation in operations(nbytes).items():
            measured[name, nbytes] = operation
    rare = frozenset(key for key in measured if key[1] >= _RARE_BYTES)
    remaining = seconds - (time.perf_counter() - began)
    times = _measure_rounds(measured, group, device, remaining, most=most_rounds, rare=rare)

    costs: dict[str, Cost] = {}
    for name in names:
        # A fit needs positive times.
        samples = [(nbytes, max(times[name, nbytes], 1e-9)) for nbytes in sizes]
        costs[name] = measured_cost(samples)
    return Level(group.size(), costs)


def _measure_rounds(
    operations: Mapping[Key, Operation],
    group: dist.ProcessGroup,
    device: torch.device,
    seconds: float,
    *,
    least: int = 1,
    most: int | None = None,
    rare: frozenset[Key] = frozenset(),
) -> dict[Key, float]:
    """Return the seconds of each operation, see Note [Rounds of a measurement].

    Args:
        operations: The operations.
        group: The process group.
        device: Device of the tensors.
        seconds: Approximate time.
        least: Minimum number of rounds.
        most: Maximum number of rounds.
        rare: Operations that only every `_RARE_INTERVAL`-th round measures.
    """
    samples: dict[Key, list[float]] = {key: [] for key in operations}
    keys = list(operations)
    continues = torch.ones(1, device=device)
    rounds = 0
    began = time.perf_counter()
    while bool(continues):
        # The seed is the same on all ranks, and so is the order.
        for key in Random(rounds).sample(keys, len(keys)):
            if key not in rare or rounds % _RARE_INTERVAL == 0:
                samples[key].append(_timed(operations[key], group, device))
        rounds += 1
        has_time = time.perf_counter() - began < seconds and (most is None or rounds < most)
        continues.fill_(rounds < least or has_time)
        dist.broadcast(continues, group_src=0, group=group)

    # The first round is a warm-up. It counts only if there is no other.
    counted = [times[1:] or times for times in samples.values()]
    return dict(zip(keys, _median_of_slowest(counted, group, device), strict=True))


def _affordable_sizes(
    group: dist.ProcessGroup,
    device: torch.device,
    seconds: float,
    *,
    operations: int,
    largest_bytes: int,
) -> tuple[int, ...]:
    """Return the sizes that fit into one round's share of the time. Collective.

    The time is estimated from all-reduces of two sizes. The result is the same on all ranks.
    """
    small_seconds, large_seconds = probe(group, (SIZES[0], MIB), device=device, times=1)
    seconds_per_byte = max(0.0, large_seconds - small_seconds) / (MIB - SIZES[0])
    count = 0
    expected = 0.0
    for nbytes in SIZES:
        expected += operations * (small_seconds + seconds_per_byte * nbytes)
        count += nbytes <= largest_bytes and expected <= _ROUND_FRACTION * seconds
    return SIZES[: max(count, _FEWEST_SIZES)]


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup, name: Name, levels: Levels | None) -> None:
    run(sum_over(tensor, group, algorithm=name, levels=levels))


def _reduce_scatter(shard: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    run(reduce_scatter_steps(shard, tensor, group))


def _exchange(
    outgoing: torch.Tensor, incoming: torch.Tensor, group: dist.ProcessGroup, distance: int
) -> None:
    """Send to rank + `distance`, and receive from rank - `distance`, modulo the number of ranks."""
    ranks = group.size()
    rank = group.rank()
    to = (rank + distance) % ranks
    source = (rank - distance) % ranks
    for work in exchange(outgoing, incoming, group, to=to, source=source):
        work.wait()


def _sum_bucket(buckets: Buckets) -> None:
    buckets.start(0)
    buckets.finish(0)


def _timed(operation: Operation, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds of an operation that all ranks start together."""
    # Without the barrier the time would include waiting for ranks that are not ready.
    dist.barrier(group=group)
    began = time.perf_counter()
    operation()
    # On a device the call has only queued the operation.
    accelerator.synchronize(device)
    return time.perf_counter() - began


def _median_of_slowest(
    samples: Sequence[Sequence[float]], group: dist.ProcessGroup, device: torch.device
) -> list[float]:
    """Return the median of each list, after replacing each sample with the slowest rank's.

    The lists must have the same lengths on all ranks.
    """
    flat = [seconds for times in samples for seconds in times]
    values = torch.tensor(flat, dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    counts = [len(times) for times in samples]
    return [float(times.quantile(0.5)) for times in values.split(counts)]


@dataclass(frozen=True)
class LinkMeasurement:
    """Links of a group, and a description of their source.

    Attributes:
        links: Costs of the group.
        origin: End of the sentence "The links were ...".
    """

    links: GroupLinks
    origin: str


def find_links(
    axis: str,
    group: dist.ProcessGroup,
    levels: Levels | None,
    *,
    machines: int = 1,
    device: torch.device,
    seconds: float,
    path: Path | None = None,
    largest_bytes: int = SIZES[-1],
) -> LinkMeasurement:
    """Return the costs of the all-reduce algorithms over a group. Collective over the group.

    The result is the same on every rank.

    Args:
        axis: Name of the mesh dimension.
        group: The process group.
        levels: Groups inside and across machines.
        machines: Number of machines of the group.
        device: Device of the tensors.
        seconds: Approximate time of a measurement.
        path: File of the costs, or None. The first rank of the group reads it, and global rank 0
            writes it after a measurement.
        largest_bytes: Size of the largest message of the run.
    """
    hosts = all_gather_objects(socket.gethostname(), group)
    stored: tuple[GroupLinks | None, str] = (None, "")
    if group.rank() == 0:
        stored = _read(path, axis, group.size(), machines, hosts)
    links, reason = broadcast_object(stored, group)

    if links is not None:
        difference = _difference_from_probe(links, group, device)
        if not difference:
            return LinkMeasurement(
                links, f"measured at an earlier start of the run ({path}), and a probe agrees"
            )
        reason = difference

    began = time.perf_counter()
    measured = measure_algorithms(
        axis,
        group,
        levels,
        machines=machines,
        device=device,
        seconds=seconds,
        largest_bytes=largest_bytes,
    )
    duration = time.perf_counter() - began
    origin = f"measured at the start in {duration:.1f} s{reason}"
    links, origin = broadcast_object((measured, origin), group)

    # There may be several groups along the dimension, of which one writes the file.
    if path is not None and dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device.type,
            "hosts": hosts,
        }
        save(path, [links], facts=facts)
    return LinkMeasurement(links, origin)


def _difference_from_probe(
    links: GroupLinks, group: dist.ProcessGroup, device: torch.device
) -> str:
    """Return how a probe differs from stored links, or an empty string if it agrees. Collective."""
    sizes = (SIZES[0], MIB)
    probed = probe(group, sizes, device=device)
    stored = [algorithm_seconds(nbytes, links)["all-reduce"] for nbytes in sizes]
    seconds, stored_seconds = max(zip(probed, stored, strict=True), key=_deviation)
    if _deviation((seconds, stored_seconds)) <= AGREEMENT:
        return ""
    return (
        f", because a probe took {seconds * 1e3:.3g} ms and the stored measurement has"
        f" {stored_seconds * 1e3:.3g} ms"
    )


def _deviation(times: tuple[float, float]) -> float:
    """Return the ratio of two times, 1 or more."""
    return max(times[0] / times[1], times[1] / times[0])


def refine(
    choice: AlgorithmChoice,
    links: GroupLinks,
    group: dist.ProcessGroup,
    levels: Levels | None,
    *,
    device: torch.device,
    seconds: float,
) -> tuple[AlgorithmChoice, str]:
    """Compare the chosen algorithm with similarly fast ones. Collective over the group.

    The algorithms are measured at the message size of the run, because costs that are interpolated
    between measured sizes have errors. The result is the same on all ranks.

    Args:
        choice: The choice by the costs of the links.
        links: Costs of the links.
        group: The process group.
        levels: Groups inside and across machines.
        device: Device of the tensors.
        seconds: Approximate time. If the comparison takes much longer, the choice is not changed.

    Returns:
        (new choice, description of the comparison). The description is empty if nothing was
        compared.
    """
    if len(choice.near) < 2:
        return choice, ""
    expected_seconds = choice.seconds / choice.messages * len(choice.near) * LEAST_COMPARED
    if expected_seconds > _LONGEST_REFINEMENT * seconds:
        return choice, ""

    began = time.perf_counter()
    times = compare_algorithms(
        choice.near, choice.bucket_bytes, group, levels, device=device, seconds=seconds
    )
    duration = time.perf_counter() - began
    description = (
        f"{len(times)} algorithms were timed in turn with messages of"
        f" {format_bytes(choice.bucket_bytes)} in {duration:.1f} s"
    )
    # The duration differs between ranks, so all use the description of the first rank.
    return refined(choice, links, times), broadcast_object(description, group)


def _read(
    path: Path | None, axis: str, ranks: int, machines: int, hosts: list[str]
) -> tuple[GroupLinks | None, str]:
    """Return (stored costs of a group, ""), or (None, reason) if they cannot be used."""
    if path is None or not path.exists():
        return None, ""
    try:
        groups, facts = load_with_facts(path)
    except InputError:
        return None, f", because {path} cannot be read"
    links = groups.get(axis)
    current = (ranks, machines, hosts)
    if links is None or (links.ranks, links.machines, facts.get("hosts")) != current:
        return None, ", because the ranks or machines differ from those of the last start"
    return links, ""
