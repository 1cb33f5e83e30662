"""Selection of a group's all-reduce algorithm and bucket size by the costs of its links.

The module does not communicate, and it returns the reason with every choice.

The cost of an algorithm is its measured time. Without a measurement it is the sum of the costs of
the algorithm's operations. Compression changes the training slightly, so it is not a candidate. If
candidates cost the same, the one with the fewest operations is chosen.

The cost of a collective on a link is a fixed time plus a time per byte. It is fitted to
measurements (`comm.measure`) or derived from the latency and the bandwidth of a link.

A group has costs for all of its ranks together. If machines have several of its ranks, it also has
costs for the group inside a machine and for the group across machines (one rank per machine). All
groups of the same kind are measured at the same time, because they run at the same time in
training.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from plait.errors import InputError, first_line
from plait.files import write_atomically
from plait.names import number_of
from plait.sizes import KIB, MIB, format_bytes

LARGEST_BUCKET_BYTES = 100 * MIB
SMALLEST_BUCKET_BYTES = 256 * KIB
"""Size below which Python's overhead per bucket dominates, which costs of links do not include."""
MEASURED_TIE = 0.03
"""Relative difference up to which two measured times count as equal."""
OVERLAP_TIE = 0.15
"""Relative difference up to which the backend's own all-reduce is preferred for buckets.

Only the first operation of a composed algorithm overlaps with the backward.
"""
NEAR = 2.0
"""Cost relative to the chosen algorithm up to which `comm.measure.refine` compares others."""
_TIE = 1e-9
_ALGORITHMS = (
    "shared-memory",
    "all-reduce",
    "reduce-scatter+all-gather",
    "hierarchical",
    "recursive-doubling",
    "ring",
)
"""Algorithms with exact results, ordered by their number of operations."""


@dataclass(frozen=True)
class Cost:
    """Seconds of an operation as a function of the bytes of its tensor (alpha-beta model).

    A measured cost also stores the measured times, because backends change their protocol with the
    size.

    Attributes:
        fixed_seconds: Time that does not depend on the size.
        seconds_per_byte: Time per byte.
        samples: Measured (bytes, seconds), both increasing. Empty if the cost is not measured.
    """

    fixed_seconds: float
    seconds_per_byte: float
    samples: tuple[tuple[int, float], ...] = ()

    def seconds(self, nbytes: float) -> float:
        """Return the seconds for a tensor of `nbytes`.

        Between samples the time is interpolated. Beyond the last sample it is extrapolated with the
        slope between the first and the last sample, which depends little on a disturbed sample.
        """
        if not self.samples:
            return self.fixed_seconds + self.seconds_per_byte * nbytes

        first_bytes, first_seconds = self.samples[0]
        last_bytes, last_seconds = self.samples[-1]
        if nbytes > last_bytes:
            slope_seconds = (nbytes - last_bytes) * (last_seconds - first_seconds)
            return last_seconds + slope_seconds / (last_bytes - first_bytes)

        points = [(0, min(self.fixed_seconds, first_seconds)), *self.samples]
        index = min(bisect_right([size for size, _ in points], nbytes), len(points) - 1)
        low, low_seconds = points[index - 1]
        high, high_seconds = points[index]
        return low_seconds + (nbytes - low) * (high_seconds - low_seconds) / (high - low)


def measured_cost(samples: Sequence[tuple[int, float]]) -> Cost:
    """Fit a cost to (bytes, seconds) measurements, and store the measurements in the cost.

    Disturbances only add time. If a larger tensor took less time than a smaller one, the
    measurement of the smaller one was disturbed and is replaced with the time of the larger one.
    """
    increasing: list[tuple[int, float]] = []
    shortest = math.inf
    for nbytes, seconds in sorted(samples, reverse=True):
        shortest = min(shortest, seconds)
        increasing.append((nbytes, shortest))
    increasing.reverse()
    line = fit(increasing)
    return Cost(line.fixed_seconds, line.seconds_per_byte, tuple(increasing))


def fit(samples: Sequence[tuple[int, float]]) -> Cost:
    """Fit a cost by least squares of the relative errors, with both terms at least 0.

    Args:
        samples: (bytes, seconds) of at least two sizes.

    Raises:
        ValueError: There is only one size, or a time is not positive.
    """
    if len({nbytes for nbytes, _ in samples}) < 2 or any(seconds <= 0 for _, seconds in samples):
        raise ValueError("a fit requires at least two sizes and positive times; measure more sizes")
    # Minimize sum ((a + b x) / y - 1)^2.
    s11 = math.fsum(1 / y**2 for _, y in samples)
    s12 = math.fsum(x / y**2 for x, y in samples)
    s22 = math.fsum(x**2 / y**2 for x, y in samples)
    t1 = math.fsum(1 / y for _, y in samples)
    t2 = math.fsum(x / y for x, y in samples)
    determinant = s11 * s22 - s12**2
    fixed = (t1 * s22 - t2 * s12) / determinant
    per_byte = (t2 * s11 - t1 * s12) / determinant

    # If one term is negative, it is 0 in the best nonnegative solution.
    if fixed < 0:
        return Cost(0.0, t2 / s22)
    if per_byte < 0:
        return Cost(t1 / s11, 0.0)
    return Cost(fixed, per_byte)


@dataclass(frozen=True)
class Link:
    """Connection between two ranks.

    Attributes:
        latency_seconds: Time until a message begins to arrive.
        bytes_per_second: Bandwidth of each direction.
    """

    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Level:
    """Costs of the operations among a set of ranks.

    The costs of `all_reduce`, `all_gather` and `reduce_scatter` are functions of the bytes of the
    full tensor. The cost of `exchange` is a function of the bytes that a rank sends to the next
    rank while it receives as many. `far_exchange` is an exchange with a rank of another machine
    that all ranks perform at once. It exists only if there are several machines. Measured
    all-reduce algorithms have the names that `comm.all_reduce` defines, or `shared-memory`, `int8`
    and `int4`.

    Attributes:
        ranks: Number of ranks.
        costs: Cost of each operation.
    """

    ranks: int
    costs: Mapping[str, Cost]


@dataclass(frozen=True)
class GroupLinks:
    """Costs of one process group.

    Attributes:
        axis: Name of the mesh dimension.
        machines: Number of machines.
        per_machine: Ranks of the group on each machine.
        whole: Costs among all ranks of the group.
        inside: Costs among the ranks of one machine if there are several machines with several
            ranks each, otherwise None.
        across: Costs among one rank per machine, or None if `inside` is None.
    """

    axis: str
    machines: int
    per_machine: int
    whole: Level
    inside: Level | None = None
    across: Level | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks of the group."""
        return self.machines * self.per_machine


def ring_level(ranks: int, link: Link, *, slow_steps: int = 0, slow: Link | None = None) -> Level:
    """Return the costs of a ring, as NCCL models its own ring (graph/tuning.cc).

    The latencies of all steps add up. The bandwidth is that of the slowest link.

    Args:
        ranks: Number of ranks.
        link: Link between neighbours.
        slow_steps: Number of steps of an all-gather that use the slow link.
        slow: Link between machines, if the ring spans several.
    """
    steps = ranks - 1
    slowest = slow or link
    latency = (steps - slow_steps) * link.latency_seconds + slow_steps * slowest.latency_seconds
    rate = min(link.bytes_per_second, slowest.bytes_per_second)
    half_cost = Cost(latency, steps / ranks / rate)
    costs = {
        "all_reduce": Cost(2 * latency, 2 * half_cost.seconds_per_byte),
        "all_gather": half_cost,
        "reduce_scatter": half_cost,
        "exchange": Cost(max(link.latency_seconds, slowest.latency_seconds), 1 / rate),
    }
    if slow is not None:
        # All ranks of a machine share its link to other machines.
        ranks_per_machine = ranks / (slow_steps + 1)
        costs["far_exchange"] = Cost(
            slow.latency_seconds, ranks_per_machine / slow.bytes_per_second
        )
    return Level(ranks, costs)


def describe(
    axis: str, *, machines: int, per_machine: int, inside: Link, network: Link | None = None
) -> GroupLinks:
    """Estimate a group's costs from its links' latency and bandwidth, without measurements.

    Args:
        axis: Name of the mesh dimension.
        machines: Number of machines.
        per_machine: Ranks of the group on each machine.
        inside: Link between two devices of one machine.
        network: Link between machines, with the bandwidth of all network cards of a machine
            together. It may be None for one machine.
    """
    ranks = machines * per_machine
    if machines == 1 or network is None:
        return GroupLinks(axis, 1, ranks, ring_level(ranks, inside))

    neighbour_link = inside if per_machine > 1 else network
    group_level = ring_level(ranks, neighbour_link, slow_steps=machines - 1, slow=network)
    if per_machine == 1:
        return GroupLinks(axis, machines, 1, group_level)

    # The groups across machines, one per local rank, run at the same time.
    shared_network = Link(network.latency_seconds, network.bytes_per_second / per_machine)
    return GroupLinks(
        axis,
        machines,
        per_machine,
        group_level,
        ring_level(per_machine, inside),
        ring_level(machines, shared_network),
    )


def save(path: Path, groups: Sequence[GroupLinks], *, facts: Mapping[str, Any]) -> None:
    """Write measured links to a JSON file.

    Args:
        path: The file.
        groups: The measurements.
        facts: Circumstances of the measurement, such as time and hosts.
    """
    content = {"facts": dict(facts), "groups": [asdict(group) for group in groups]}
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def load_with_facts(path: Path) -> tuple[dict[str, GroupLinks], dict[str, Any]]:
    """Return (links by axis, facts) from a file that `save` wrote.

    Raises:
        InputError: The file is missing or has another form.
    """
    try:
        content = json.loads(path.read_text())
        groups = TypeAdapter(list[GroupLinks]).validate_python(content["groups"])
        return {group.axis: group for group in groups}, dict(content["facts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"links file {path}: {first_line(error)}; remove the file to measure the links again"
        ) from None


@dataclass(frozen=True)
class AlgorithmChoice:
    """A selected algorithm with its cost.

    Attributes:
        algorithm: Name of an algorithm of `comm.all_reduce`, or `shared-memory`.
        seconds: Time of all messages together.
        bucket_bytes: Size of one message.
        reason: Explanation for the user.
        others: Name and time of every other candidate, cheapest first.
        total_bytes: Size of all messages together.
        in_buckets: Whether the messages overlap with a backward.
        why: Last sentence of `reason`, which explains why the algorithm is fast.
    """

    algorithm: str
    seconds: float
    bucket_bytes: int
    reason: str
    others: tuple[tuple[str, float], ...]
    total_bytes: int
    in_buckets: bool
    why: str

    @property
    def messages(self) -> int:
        """Number of messages."""
        return math.ceil(self.total_bytes / self.bucket_bytes)

    @property
    def near(self) -> tuple[str, ...]:
        """The selected algorithm, and all others that take at most NEAR times as long."""
        limit = NEAR * self.seconds
        return self.algorithm, *(name for name, seconds in self.others if seconds <= limit)


def algorithm_seconds(nbytes: float, group: GroupLinks) -> dict[str, float]:
    """Return the seconds of an all-reduce for every algorithm.

    Args:
        nbytes: Size of the float32 tensor.
        group: Costs of the links.

    Returns:
        Seconds by algorithm. Algorithms with fewer operations come first.
    """
    costs = group.whole.costs
    seconds: dict[str, float] = {}
    if "exchange" in costs:
        seconds = _composed_seconds(nbytes, group)
    seconds |= {name: cost.seconds(nbytes) for name, cost in costs.items()}
    return {name: seconds[name] for name in _ALGORITHMS if name in seconds}


def _composed_seconds(nbytes: float, group: GroupLinks) -> dict[str, float]:
    """Return the seconds of every algorithm as the sum of the seconds of its operations."""
    costs = group.whole.costs
    ranks = group.ranks
    seconds = {
        "all-reduce": costs["all_reduce"].seconds(nbytes),
        "reduce-scatter+all-gather": (
            costs["reduce_scatter"].seconds(nbytes) + costs["all_gather"].seconds(nbytes)
        ),
    }

    if group.inside is not None and group.across is not None:
        inside = group.inside.costs
        across_seconds = group.across.costs["all_reduce"].seconds(nbytes / group.per_machine)
        reduced = inside["reduce_scatter"].seconds(nbytes) + across_seconds
        seconds["hierarchical"] = reduced + inside["all_gather"].seconds(nbytes)

    # Partners at the largest distances are on other machines. A number of ranks that is not a power
    # of two needs two more messages.
    far_steps = math.floor(math.log2(group.machines)) if "far_exchange" in costs else 0
    is_power_of_two = ranks & (ranks - 1) == 0
    near_steps = math.floor(math.log2(ranks)) - far_steps
    if not is_power_of_two:
        near_steps += 2
    near_cost = (group.inside or group.whole).costs["exchange"]
    doubling = near_steps * near_cost.seconds(nbytes)
    if far_steps:
        doubling += far_steps * costs["far_exchange"].seconds(nbytes)
    seconds["recursive-doubling"] = doubling
    seconds["ring"] = 2 * (ranks - 1) * costs["exchange"].seconds(nbytes / ranks)
    return seconds


def choose_all_reduce(nbytes: int, group: GroupLinks) -> AlgorithmChoice:
    """Return the cheapest algorithm for an all-reduce in one message.

    Args:
        nbytes: Size of the float32 tensor.
        group: Costs of the links.
    """
    return _choose(nbytes, 1, algorithm_seconds(nbytes, group), group, in_buckets=False)


def refined(
    choice: AlgorithmChoice, group: GroupLinks, times: Mapping[str, float]
) -> AlgorithmChoice:
    """Revise a choice with times that were measured at its message size.

    Args:
        choice: The choice that was made by the costs of the links.
        group: Costs of the links.
        times: Measured seconds of one message, by algorithm.
    """
    count = choice.messages
    measured = {name: count * seconds for name, seconds in times.items()}
    estimated = {choice.algorithm: choice.seconds, **dict(choice.others), **measured}
    candidates = {name: estimated[name] for name in _ALGORITHMS if name in times}
    return _choose(
        choice.total_bytes,
        count,
        candidates,
        group,
        in_buckets=choice.in_buckets,
        all_seconds=estimated,
    )


def choose_buckets(
    gradient_bytes: int, group: GroupLinks, *, bucket_bytes: int | None = None
) -> AlgorithmChoice:
    """Return the cheapest algorithm and bucket size for gradients that are summed in buckets.

    A bucket is sent when the backward has filled it. Smaller buckets start earlier, but each adds a
    fixed time. The size matters most if the backward takes T(G) seconds, as long as one all-reduce
    of all gradients G. The sum of N buckets then ends T(G) / N + N T(G / N) after the backward has
    started. For T(x) = a + b x the minimum of this time is at N = sqrt(b G / a).

    Args:
        gradient_bytes: Size of all gradients in float32.
        group: Costs of the links.
        bucket_bytes: Size of the buckets, or None to choose it.
    """
    total = max(gradient_bytes, 1)
    single_message = algorithm_seconds(total, group)

    def price_all(count: int) -> dict[str, float]:
        # Small messages may pass through the buffers of a switch. Many of them in sequence are not
        # faster than one message with all bytes.
        return {
            name: max(count * seconds, single_message[name])
            for name, seconds in algorithm_seconds(total / count, group).items()
        }

    def end_seconds(count: int) -> float:
        """Return the seconds from the start of the backward to the end of the last all-reduce."""
        return min(
            single_message[name] / count + seconds for name, seconds in price_all(count).items()
        )

    if bucket_bytes is not None:
        count = math.ceil(total / min(bucket_bytes, total))
    else:
        counts = [math.ceil(total / LARGEST_BUCKET_BYTES)]
        while total / (2 * counts[-1]) >= SMALLEST_BUCKET_BYTES:
            counts.append(2 * counts[-1])
        count = min(counts, key=end_seconds)
    return _choose(total, count, price_all(count), group, in_buckets=True)


def _choose(
    nbytes: int,
    count: int,
    candidates: Mapping[str, float],
    group: GroupLinks,
    *,
    in_buckets: bool,
    all_seconds: Mapping[str, float] | None = None,
) -> AlgorithmChoice:
    """Return the cheapest candidate with its reason.

    Args:
        nbytes: Size of all messages.
        count: Number of messages.
        candidates: Seconds by algorithm. The first of equal candidates is chosen.
        group: Costs of the links.
        in_buckets: Whether the messages overlap with a backward.
        all_seconds: Seconds of all algorithms, for the reason. None if all are candidates.
    """
    cheapest = min(candidates.values())
    is_measured = any(cost.samples for cost in group.whole.costs.values())
    tie = MEASURED_TIE if is_measured else _TIE
    best = next(name for name, seconds in candidates.items() if seconds <= cheapest * (1 + tie))
    if in_buckets and is_measured and best != "shared-memory":
        overlap_limit = candidates[best] * (1 + OVERLAP_TIE)
        if candidates.get("all-reduce", math.inf) <= overlap_limit:
            best = "all-reduce"

    estimated = all_seconds or candidates
    others = [(name, seconds) for name, seconds in estimated.items() if name != best]
    others.sort(key=itemgetter(1))

    bucket = math.ceil(nbytes / count)
    where = f"{group.ranks} ranks on {number_of(group.machines, 'machine')}"
    result = f"{best} {_milliseconds(candidates[best])}"
    if count > 1:
        result += f" in {count} buckets of {format_bytes(bucket)}"
    cheapest_others = ", ".join(f"{name} {_milliseconds(seconds)}" for name, seconds in others[:3])
    why = _why(best, group)
    reason = (
        f"{format_bytes(nbytes)} over {group.axis}, {where}: {result}; {cheapest_others}. {why}"
    )
    return AlgorithmChoice(
        best, candidates[best], bucket, reason, tuple(others), nbytes, in_buckets, why
    )


def _why(algorithm: str, group: GroupLinks) -> str:
    """Return why an algorithm is the fastest on the links of a group."""
    if algorithm == "hierarchical":
        return f"Only 1/{group.per_machine} of the bytes of each rank cross between machines."
    if algorithm == "recursive-doubling":
        return "Fewest sequential messages, each with all bytes."
    if algorithm == "shared-memory":
        return "All ranks are on one machine and share memory."
    if algorithm == "all-reduce":
        return "The backend's own all-reduce; no composed algorithm is cheaper."
    return "As many bytes as the backend's own all-reduce, and less time on these links."


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
