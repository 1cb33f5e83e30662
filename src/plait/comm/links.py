"""What collectives cost on a machine's or a cluster's links: a fixed time and a time per byte each,
fitted from measurements or derived from a link's latency and bandwidth. Pure; `comm.measure`
measures.

A group has costs for all of its ranks together, and where machines hold several of them, also for
the intra-node group and the inter-node group (one rank of each machine; all such groups at once, as
they run in practice).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from plait.errors import InputError
from plait.files import write_whole


@dataclass(frozen=True)
class Cost:
    """Seconds of an operation on a tensor of some bytes: the alpha-beta model, and where it was
    measured the times themselves, because backends change their protocol with the size.
    """

    fixed_seconds: float
    seconds_per_byte: float
    samples: tuple[tuple[int, float], ...] = ()
    """(bytes, seconds), both growing."""

    def at(self, nbytes: float) -> float:
        """Seconds for a tensor of `nbytes`: on the lines between samples, and beyond them with the
        slope from the first to the last, which one disturbed sample changes least.
        """
        if not self.samples:
            return self.fixed_seconds + self.seconds_per_byte * nbytes
        first = self.samples[0]
        last = self.samples[-1]
        if nbytes > last[0]:
            return last[1] + (nbytes - last[0]) * (last[1] - first[1]) / (last[0] - first[0])
        points = [(0, min(self.fixed_seconds, first[1])), *self.samples]
        place = min(bisect_right([size for size, _ in points], nbytes), len(points) - 1)
        (low, low_seconds), (high, high_seconds) = points[place - 1], points[place]
        return low_seconds + (nbytes - low) * (high_seconds - low_seconds) / (high - low)


def measured_cost(samples: Sequence[tuple[int, float]]) -> Cost:
    """A fit that keeps its samples. A larger tensor never takes less time: where it seemed so, the
    smaller one was disturbed, because what disturbs only adds.
    """
    falling = accumulate(
        sorted(samples, reverse=True), lambda larger, now: (now[0], min(larger[1], now[1]))
    )
    growing = tuple(falling)[::-1]
    line = fit(growing)
    return Cost(line.fixed_seconds, line.seconds_per_byte, growing)


def fit(samples: Sequence[tuple[int, float]]) -> Cost:
    """The Cost with the least squared relative errors for (bytes, seconds), neither part negative.
    Needs two sizes. Raises ValueError.
    """
    if len({nbytes for nbytes, _ in samples}) < 2 or any(seconds <= 0 for _, seconds in samples):
        raise ValueError("a fit needs two sizes and positive times")
    # Minimise sum ((a + b x) / y - 1)^2.
    s11 = math.fsum(1 / y**2 for _, y in samples)
    s12 = math.fsum(x / y**2 for x, y in samples)
    s22 = math.fsum(x**2 / y**2 for x, y in samples)
    t1 = math.fsum(1 / y for _, y in samples)
    t2 = math.fsum(x / y for x, y in samples)
    determinant = s11 * s22 - s12**2
    fixed = (t1 * s22 - t2 * s12) / determinant
    per_byte = (t2 * s11 - t1 * s12) / determinant
    if fixed < 0:
        return Cost(0.0, t2 / s22)
    return Cost(fixed, per_byte) if per_byte >= 0 else Cost(t1 / s11, 0.0)


@dataclass(frozen=True)
class Link:
    """One rank's connection to the next: seconds until a message begins to arrive, and bytes per
    second of each direction.
    """

    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Level:
    """Ranks that talk to each other, and what it costs. Operations: `all_reduce`, `all_gather`,
    `reduce_scatter` (bytes of the full tensor), `exchange` (bytes sent to the next rank while as
    many come), `far_exchange` (the same with a rank of another machine, all ranks at once; where
    there are several machines). And complete all-reduce algorithms, where they were measured
    directly: the names of `comm.algorithms`, `shared-memory`, `int8`.
    """

    ranks: int
    costs: Mapping[str, Cost]


@dataclass(frozen=True)
class GroupLinks:
    """One axis of a layout."""

    axis: str
    machines: int
    per_machine: int
    whole: Level
    inside: Level | None = None
    across: Level | None = None

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return self.machines * self.per_machine


def ring_level(ranks: int, link: Link, *, slow_steps: int = 0, slow: Link | None = None) -> Level:
    """What a ring costs: latency of every step, `slow_steps` of an all-gather's over the slow link
    (twice that of an all-reduce's); bytes over the slower of the two links. NCCL's model of its
    ring (graph/tuning.cc).
    """
    steps = ranks - 1
    other = slow or link
    latency = (steps - slow_steps) * link.latency_seconds + slow_steps * other.latency_seconds
    rate = min(link.bytes_per_second, other.bytes_per_second)
    half = Cost(latency, steps / ranks / rate)
    whole = Cost(2 * latency, 2 * half.seconds_per_byte)
    exchange = Cost(max(link.latency_seconds, other.latency_seconds), 1 / rate)
    costs = {"all_reduce": whole, "all_gather": half, "reduce_scatter": half, "exchange": exchange}
    if slow is not None:
        costs["far_exchange"] = Cost(
            slow.latency_seconds, ranks / (slow_steps + 1) / slow.bytes_per_second
        )
    return Level(ranks, costs)


def describe(
    axis: str, *, machines: int, per_machine: int, inside: Link, network: Link | None = None
) -> GroupLinks:
    """Links from a description: `inside` one machine, between two devices; `network` between
    machines, all of one machine's cards together. For planning where nothing can be measured.
    """
    ranks = machines * per_machine
    if machines == 1 or network is None:
        return GroupLinks(axis, 1, ranks, ring_level(ranks, inside))
    whole = ring_level(
        ranks, inside if per_machine > 1 else network, slow_steps=machines - 1, slow=network
    )
    if per_machine == 1:
        return GroupLinks(axis, machines, 1, whole)
    shared = Link(network.latency_seconds, network.bytes_per_second / per_machine)
    return GroupLinks(
        axis,
        machines,
        per_machine,
        whole,
        ring_level(per_machine, inside),
        ring_level(machines, shared),
    )


def save(path: Path, groups: Sequence[GroupLinks], *, facts: Mapping[str, Any]) -> None:
    """Write what was measured, with `facts` about when and where."""
    write_whole(
        path,
        json.dumps({"facts": dict(facts), "groups": [asdict(group) for group in groups]}, indent=1)
        + "\n",
    )


def load_with_facts(path: Path) -> tuple[dict[str, GroupLinks], dict[str, Any]]:
    """Return the groups by axis, and the facts. Raises InputError for a file that is missing or of
    another form.
    """
    try:
        content = json.loads(path.read_text())
        return {group["axis"]: _group(group) for group in content["groups"]}, dict(content["facts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"links file {path}: {error}; remove it, and the links are measured again"
        ) from None


def _group(content: Any) -> GroupLinks:
    return GroupLinks(
        **{**content, **{name: _level(content[name]) for name in ("whole", "inside", "across")}}
    )


def _level(content: Any) -> Any:
    if content is None:
        return None
    return Level(content["ranks"], {name: _cost(cost) for name, cost in content["costs"].items()})


def _cost(content: Any) -> Cost:
    return Cost(
        **{
            **content,
            "samples": tuple(
                (int(nbytes), float(seconds)) for nbytes, seconds in content.get("samples", ())
            ),
        }
    )
