"""The layout: the degrees of the parallel axes and the arithmetic from ranks to coordinates and
groups.

Pure: no process group, no torch. Ranks are laid out with `tp` fastest, so that neighbouring ranks
(one node) share a tensor-parallel group, and `pp` slowest, so that stages cross nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import product
from math import gcd, prod

from plait.errors import ConfigError, Problem, refuse

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost (slowest links) first."""
SAMPLE_AXES = ("dp_replicate", "dp_shard")
"""Axes whose ranks read different samples."""
TOKEN_AXES = (*SAMPLE_AXES, "cp")
"""Axes whose ranks may compute with different tokens, from other samples or from another part of
the sequence.
"""
SPLIT_AXES = ("pp", "dp_shard", "cp", "tp")
"""Axes over which parts of a model may be split; over `dp_replicate` everything is replicated."""
EXPERT_AXES = ("edp", "ep")
"""A second view of the ranks of a pipeline stage, for experts: they are split over `ep`, which
takes neighbouring ranks, and replicated or sharded over `edp`.
"""
STAGE_AXES = (*TOKEN_AXES, "tp")
"""The first view of the same ranks."""


@dataclass(frozen=True)
class Layout:
    """The degree of every axis. Their product is the world size.

    >>> layout = Layout(pp=2, dp_shard=2, tp=2)
    >>> layout.coordinates(5)
    {'pp': 1, 'dp_replicate': 0, 'dp_shard': 0, 'cp': 0, 'tp': 1}
    >>> layout.groups("tp")
    ((0, 1), (2, 3), (4, 5), (6, 7))
    >>> layout.groups("dp_shard")
    ((0, 2), (1, 3), (4, 6), (5, 7))
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Of the ranks of a pipeline stage, how many have different experts. No factor of the world
    size.
    """

    def __post_init__(self) -> None:
        bad = [
            Problem(
                f"parallel.{f.name}",
                getattr(self, f.name),
                "the degree of an axis is at least 1",
                "use 1 to leave the axis out",
            )
            for f in fields(self)
            if getattr(self, f.name) < 1
        ]
        refuse(bad)
        ranks = self.stage_ranks
        if ranks % self.ep:
            more = "".join(
                f" x {axis} {getattr(self, axis)}"
                for axis in ("cp", "tp")
                if getattr(self, axis) > 1
            )
            product = f"dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard}{more} = {ranks}"
            rule = (
                f"experts are split over the processes of a pipeline stage, {product}, and {ranks}"
                f" % {self.ep} = {ranks % self.ep}"
            )
            raise ConfigError(
                Problem(
                    "parallel.ep",
                    self.ep,
                    rule,
                    f"use a divisor of {ranks}, such as {gcd(ranks, self.ep)}",
                )
            )

    @property
    def degrees(self) -> dict[str, int]:
        """Axis to degree, outermost first."""
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
        """`degrees`, and those of the second view where experts are split."""
        return {
            **self.degrees,
            **({"edp": self.stage_ranks // self.ep, "ep": self.ep} if self.ep > 1 else {}),
        }

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank sits on every axis, and in the second view where experts are split. Raises
        IndexError outside the world.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of a world of {self.world_size}")
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        at = {axis: found[axis] for axis in AXES}
        if self.ep > 1:
            at["edp"], at["ep"] = divmod(self._in_stage(at), self.ep)
        return at

    def rank(self, **coordinates: int) -> int:
        """The rank at the given coordinates, of either view; axes not given are 0."""
        if not coordinates.keys().isdisjoint(EXPERT_AXES):
            index = coordinates.get("edp", 0) * self.ep + coordinates.get("ep", 0)
            for axis in reversed(STAGE_AXES):
                index, coordinates[axis] = divmod(index, getattr(self, axis))
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + coordinates.get(axis, 0)
        return rank

    def _in_stage(self, at: Mapping[str, int]) -> int:
        index = 0
        for axis in STAGE_AXES:
            index = index * getattr(self, axis) + at[axis]
        return index

    def dp_index(self, rank: int) -> int:
        """Which slice of the batch a rank reads: 0 to dp - 1, the same for all its tp, cp and pp
        partners.
        """
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """The rank groups that communicate along `axes` taken together, in the order of their
        smallest rank.
        """
        rest = [axis for axis in AXES if axis not in axes]
        inner = [axis for axis in AXES if axis in axes]
        return tuple(
            tuple(
                self.rank(
                    **dict(zip(rest, outer, strict=True)), **dict(zip(inner, point, strict=True))
                )
                for point in product(*(range(getattr(self, axis)) for axis in inner))
            )
            for outer in product(*(range(getattr(self, axis)) for axis in rest))
        )

    def __str__(self) -> str:
        used = [f"{axis}={degree}" for axis, degree in self.degrees.items() if degree > 1]
        used += [f"ep={self.ep}"] if self.ep > 1 else []
        return " x ".join(used) or "one process"
