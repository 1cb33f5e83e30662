"""Costs of collectives on the links of a machine or a cluster.

A cost is a fixed time plus a time per byte. It is fitted to measurements (`comm.measure`) or
derived from the latency and the bandwidth of a link. The module itself communicates nothing.

A group has costs for all of its ranks together. If machines have several of its ranks, it also has
costs for the group inside a machine and for the group across machines (one rank per machine). All
groups of the same kind are measured at the same time, as they run in training.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plait.errors import InputError
from plait.files import write_atomically


@dataclass(frozen=True)
class Cost:
    """Seconds of an operation as a function of the bytes of its tensor (alpha-beta model).

    A measured cost also has the measured times, because backends change their protocol with the
    size.

    Attributes:
        fixed_seconds: Time that does not depend on the size.
        seconds_per_byte: Time per byte.
        samples: Measured (bytes, seconds), both increasing. Empty if derived from a link.
    """

    fixed_seconds: float
    seconds_per_byte: float
    samples: tuple[tuple[int, float], ...] = ()

    def at(self, nbytes: float) -> float:
        """Return the seconds for a tensor of `nbytes`.

        Between samples the time is interpolated. Beyond the last sample it follows the slope from
        the first to the last sample, which a single disturbed sample changes least.
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
    """Return a cost that is fitted to measurements of (bytes, seconds) and contains them.

    Disturbances only add time. If a larger tensor took less time than a smaller one, the smaller
    measurement was disturbed and is lowered to the larger one's time.
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
        raise ValueError("a fit needs two sizes and positive times")
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
    """Connection of one rank to the next.

    Attributes:
        latency_seconds: Time until a message begins to arrive.
        bytes_per_second: Bandwidth of each direction.
    """

    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Level:
    """Costs of the operations among a set of ranks.

    The operations are `all_reduce`, `all_gather` and `reduce_scatter` (bytes of the full tensor),
    `exchange` (bytes sent to the next rank while as many arrive) and, with several machines,
    `far_exchange` (the same with a rank of another machine, by all ranks at once). Complete
    all-reduce algorithms that were measured have the names of `comm.algorithms`, `shared-memory`,
    `int8` and `int4`.

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
        inside: Costs among the ranks of one machine, if there are several machines with several
            ranks.
        across: Costs among one rank per machine, in the same case.
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

    The latency is that of every step. The bandwidth is that of the slower link.

    Args:
        ranks: Number of ranks.
        link: Link between neighbours.
        slow_steps: Steps of an all-gather that use the slow link. An all-reduce has twice as many.
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
    """Derive the costs of a group from its links, for planning without measurements.

    Args:
        axis: Name of the mesh dimension.
        machines: Number of machines.
        per_machine: Ranks of the group on each machine.
        inside: Link between two devices of one machine.
        network: Link between machines, of all network cards of a machine together.
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
    """Return the groups of a file that `save` wrote, by axis, and its facts.

    Raises:
        InputError: The file is missing or has another form.
    """
    try:
        content = json.loads(path.read_text())
        return {group["axis"]: _group(group) for group in content["groups"]}, dict(content["facts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"links file {path}: {error}; remove it, and the links are measured again"
        ) from None


def _group(content: Any) -> GroupLinks:
    levels = {name: _level(content[name]) for name in ("whole", "inside", "across")}
    return GroupLinks(**{**content, **levels})


def _level(content: Any) -> Any:
    if content is None:
        return None
    return Level(content["ranks"], {name: _cost(cost) for name, cost in content["costs"].items()})


def _cost(content: Any) -> Cost:
    samples = tuple((int(nbytes), float(seconds)) for nbytes, seconds in content.get("samples", ()))
    return Cost(**{**content, "samples": samples})
