"""Layout: degrees of the parallel dimensions, arithmetic of ranks, and placement on machines.

The module needs neither torch nor process groups. In the numbering of ranks, `tp` varies fastest
and `pp` slowest. The ranks of a tensor-parallel group are therefore on one machine if possible, and
pipeline stages on different machines.

Note [Two views of a stage]
    The ranks of a pipeline stage have two coordinate systems. Most code uses the dimensions
    STAGE_AXES. Experts use EXPERT_AXES: they are split over `ep`, which takes neighbouring ranks,
    and replicated or sharded over `edp`. Both views have the same ranks, so `ep` is not a factor of
    the world size.

A tensor dimension is split between the ranks of a group (`shard_lengths`) by the rule of
`torch.chunk`, as in `fully_shard` and DTensor.

On machines, ranks are numbered machine by machine, and tp is the innermost dimension of a layout,
so the ranks of a tensor-parallel group have consecutive numbers. `crossings` counts the groups that
span several machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import count, islice, product
from math import gcd, prod
from typing import Any

import numpy as np

from plait.cluster.machines import Topology
from plait.errors import ConfigError, Problem, raise_problems
from plait.names import number_of

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Dimensions of a layout. The outermost one, with the slowest links, is first."""
SAMPLE_AXES = ("dp_replicate", "dp_shard")
"""Dimensions whose ranks read different samples."""
TOKEN_AXES = (*SAMPLE_AXES, "cp")
"""Dimensions whose ranks may compute with different tokens.

The tokens are of other samples or of another part of the sequence.
"""
SPLIT_AXES = ("pp", "dp_shard", "cp", "tp")
"""Dimensions over which parts of a model may be split. `dp_replicate` replicates everything."""
EXPERT_AXES = ("edp", "ep")
"""Dimensions of the ranks of a pipeline stage for experts, see Note [Two views of a stage]."""
STAGE_AXES = (*TOKEN_AXES, "tp")
"""Dimensions of the ranks of a pipeline stage for all other parameters."""


@dataclass(frozen=True)
class Layout:
    """Degree of every parallel dimension. The product of all but `ep` is the world size.

    >>> layout = Layout(pp=2, dp_shard=2, tp=2)
    >>> layout.coordinates(5)
    {'pp': 1, 'dp_replicate': 0, 'dp_shard': 0, 'cp': 0, 'tp': 1}
    >>> layout.groups("tp")
    ((0, 1), (2, 3), (4, 5), (6, 7))
    >>> layout.groups("dp_shard")
    ((0, 2), (1, 3), (4, 6), (5, 7))

    Attributes:
        pp: Number of pipeline ranks.
        dp_replicate: Number of replicas of the sharded model.
        dp_shard: Number of ranks over which parameters, gradients or optimizer states are sharded.
        cp: Number of ranks over which a sequence is split.
        tp: Number of ranks over which the layers are split.
        ep: Number of ranks over which the experts of a layer are split.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        raise_problems(
            [
                Problem(
                    f"parallel.{f.name}",
                    getattr(self, f.name),
                    "the degree of an axis is at least 1",
                    "use 1 to leave the axis out",
                )
                for f in fields(self)
                if getattr(self, f.name) < 1
            ]
        )
        if self.stage_ranks % self.ep:
            raise self._ep_error()

    def _ep_error(self) -> ConfigError:
        """Return the error for an `ep` that does not divide the ranks of a stage."""
        ranks = self.stage_ranks
        factors = f"dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard}"
        for axis in ("cp", "tp"):
            if getattr(self, axis) > 1:
                factors += f" x {axis} {getattr(self, axis)}"
        rule = (
            f"experts are split over the processes of a pipeline stage, {factors} = {ranks}, and"
            f" {ranks} % {self.ep} = {ranks % self.ep}"
        )
        remedy = f"use a divisor of {ranks}, such as {gcd(ranks, self.ep)}"
        return ConfigError(Problem("parallel.ep", self.ep, rule, remedy))

    @property
    def degrees(self) -> dict[str, int]:
        """Degree of every dimension in AXES, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return prod(self.degrees.values())

    @property
    def dp(self) -> int:
        """Number of different slices of the batch: dp_replicate x dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of a pipeline stage: the product of STAGE_AXES."""
        return self.dp * self.cp * self.tp

    @property
    def all_degrees(self) -> dict[str, int]:
        """Degree of every dimension, including EXPERT_AXES if experts are split."""
        degrees = self.degrees
        if self.ep > 1:
            degrees["edp"] = self.stage_ranks // self.ep
            degrees["ep"] = self.ep
        return degrees

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank, including EXPERT_AXES if experts are split.

        Raises:
            IndexError: There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"no rank {rank}: this layout has ranks 0 to {self.world_size - 1}")
        reversed_coordinates = {}
        for axis in reversed(AXES):
            rank, reversed_coordinates[axis] = divmod(rank, getattr(self, axis))
        # The result is in the order of AXES.
        coordinates = {axis: reversed_coordinates[axis] for axis in AXES}
        if self.ep > 1:
            stage_rank = self._position(coordinates, STAGE_AXES)
            coordinates["edp"], coordinates["ep"] = divmod(stage_rank, self.ep)
        return coordinates

    def rank(self, **coordinates: int) -> int:
        """Return the rank at coordinates of one of the views in Note [Two views of a stage].

        Dimensions that are not passed are 0.
        """
        if not coordinates.keys().isdisjoint(EXPERT_AXES):
            # Replace the coordinates along EXPERT_AXES with those along STAGE_AXES.
            stage_rank = coordinates.get("edp", 0) * self.ep + coordinates.get("ep", 0)
            for axis in reversed(STAGE_AXES):
                stage_rank, coordinates[axis] = divmod(stage_rank, getattr(self, axis))
        return self._position(coordinates, AXES)

    def _position(self, coordinates: Mapping[str, int], axes: Iterable[str]) -> int:
        """Return the linear index of coordinates along `axes`, of which the last varies fastest."""
        position = 0
        for axis in axes:
            position = position * getattr(self, axis) + coordinates.get(axis, 0)
        return position

    def dp_index(self, rank: int) -> int:
        """Return the index of the slice of the batch that a rank reads, from 0 to dp - 1.

        It is the same for all ranks that differ in tp, cp and pp only.
        """
        coordinates = self.coordinates(rank)
        return coordinates["dp_replicate"] * self.dp_shard + coordinates["dp_shard"]

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ along `axes` only, ordered by smallest rank."""
        inner_points = self._points([axis for axis in AXES if axis in axes])
        groups = []
        for outer in self._points([axis for axis in AXES if axis not in axes]):
            ranks = [self.rank(**outer, **inner) for inner in inner_points]
            groups.append(tuple(ranks))
        return tuple(groups)

    def _points(self, axes: list[str]) -> list[dict[str, int]]:
        """Return all coordinates along `axes`. The last dimension varies fastest."""
        ranges = [range(getattr(self, axis)) for axis in axes]
        return [dict(zip(axes, point, strict=True)) for point in product(*ranges)]

    def __str__(self) -> str:
        used = [f"{axis}={degree}" for axis, degree in self.degrees.items() if degree > 1]
        if self.ep > 1:
            used.append(f"ep={self.ep}")
        return " x ".join(used) or "one process"


def shard_size(length: Any, ranks: Any) -> Any:
    """Return ceil(length / ranks): the largest shard, and the size to which shards are padded.

    Arguments are integers or arrays of integers.
    """
    return -(-length // ranks)


def shard_length(length: Any, ranks: Any, rank: Any) -> Any:
    """Return the length of the shard of `rank`.

    It is `shard_size` for the first ranks, the remainder for the next rank, and 0 for later ranks.
    Arguments are integers or arrays of integers.
    """
    size = shard_size(length, ranks)
    remainder = length - rank * size
    if isinstance(remainder, int):
        return max(0, min(size, remainder))
    return np.clip(remainder, 0, size)


def shard_lengths(length: int, ranks: int) -> list[int]:
    """Return the lengths of the shards of all ranks."""
    return [shard_length(length, ranks, rank) for rank in range(ranks)]


def crossings(layout: Layout, topology: Topology) -> dict[str, int]:
    """Return the number of groups that span machines, by dimension, outermost first.

    Dimensions without such groups are left out.

    Raises:
        ConfigError: The layout does not fill the machines.
    """
    if layout.world_size != topology.world_size:
        rule = (
            f"the layout needs {number_of(layout.world_size, 'process')} and the machines have"
            f" {number_of(topology.world_size, 'device')}"
        )
        raise ConfigError(
            Problem(
                "parallel", str(layout), rule, f"use degrees whose product is {topology.world_size}"
            )
        )

    node_of_rank: list[int] = []
    for index, node in enumerate(topology.nodes):
        node_of_rank += [index] * node.devices
    spanning = {}
    for axis in AXES:
        if getattr(layout, axis) == 1:
            continue
        count = 0
        for group in layout.groups(axis):
            count += len({node_of_rank[rank] for rank in group}) > 1
        if count:
            spanning[axis] = count
    return spanning


def refuse_wider_than_a_node(layout: Layout, topology: Topology) -> None:
    """Check that tp fits on a machine.

    Otherwise every layer would wait for the links between machines.

    Raises:
        ConfigError: tp is larger than every machine.
    """
    largest = max(node.devices for node in topology.nodes)
    if layout.tp > largest:
        fitting = max(_tp_inside_nodes(topology, largest))
        rule = (
            f"the largest machine has {number_of(largest, 'device')}, and tensor parallelism needs"
            " its links"
        )
        raise ConfigError(Problem("parallel.tp", layout.tp, rule, f"use {fitting}"))


def crossing_warning(layout: Layout, topology: Topology) -> str | None:
    """Return a warning about tensor-parallel groups that span machines, or None."""
    spanning = crossings(layout, topology).get("tp")
    if spanning is None:
        return None
    smallest = min(node.devices for node in topology.nodes)
    fitting = max(_tp_inside_nodes(topology, layout.tp - 1))
    return (
        f"parallel.tp = {layout.tp}: {spanning} of {layout.world_size // layout.tp} tensor parallel"
        f" groups span nodes (the smallest has {number_of(smallest, 'device')}), and every layer"
        " communicates over the links between them, two all-reduces of the activations forward and"
        f" two backward; use {fitting} to stay inside"
    )


def _tp_inside_nodes(topology: Topology, largest: int) -> list[int]:
    """Return the degrees of tp up to `largest` with which no group spans machines."""
    # Groups are neighbouring ranks, so no group spans machines if the degree divides all of them.
    common = gcd(*(node.devices for node in topology.nodes))
    return [degree for degree in range(1, largest + 1) if common % degree == 0]


def rank_grid(layout: Layout, topology: Topology) -> list[list[str]]:
    """Return a table of the ranks on each machine, for printing.

    Returns:
        One row per machine: its name, and one cell per device with the rank and its coordinates
        along the dimensions of degree above 1.
    """
    used = [axis for axis in AXES if getattr(layout, axis) > 1]
    ranks = count()
    rows = []
    for node in topology.nodes:
        row = [node.name]
        for rank in islice(ranks, node.devices):
            coordinates = layout.coordinates(rank)
            row.append(" ".join([str(rank), *(f"{axis}{coordinates[axis]}" for axis in used)]))
        rows.append(row)
    return rows
