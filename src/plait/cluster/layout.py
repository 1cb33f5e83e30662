"""Layout: degrees of the parallel dimensions, and the arithmetic of ranks and coordinates.

The module needs neither torch nor process groups. In the numbering of ranks `tp` varies fastest, so
that neighbouring ranks (one machine) share a tensor-parallel group, and `pp` slowest, so that
stages are on different machines.

Note [Two views of a stage]
    The ranks of a pipeline stage have two coordinate systems. Most code uses the dimensions
    STAGE_AXES. Experts use EXPERT_AXES: they are split over `ep`, which takes neighbouring ranks,
    and replicated or sharded over `edp`. Both views have the same ranks, so `ep` is not a factor of
    the world size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import product
from math import gcd, prod

from plait.errors import ConfigError, Problem, raise_problems

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
        pp: Ranks along the pipeline.
        dp_replicate: Replicas of the sharded model.
        dp_shard: Ranks over which parameters, gradients or optimizer states are sharded.
        cp: Ranks that share a sequence.
        tp: Ranks that share every layer.
        ep: Ranks of a pipeline stage with different experts.
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
            raise IndexError(f"rank {rank} of a world of {self.world_size}")
        reversed_coordinates = {}
        for axis in reversed(AXES):
            rank, reversed_coordinates[axis] = divmod(rank, getattr(self, axis))
        # The result is in the order of AXES.
        coordinates = {axis: reversed_coordinates[axis] for axis in AXES}
        if self.ep > 1:
            stage_rank = self._rank_in_stage(coordinates)
            coordinates["edp"], coordinates["ep"] = divmod(stage_rank, self.ep)
        return coordinates

    def rank(self, **coordinates: int) -> int:
        """Return the rank at coordinates of one of the views in Note [Two views of a stage].

        Dimensions that are not passed are 0.
        """
        if not coordinates.keys().isdisjoint(EXPERT_AXES):
            # Replace the coordinates along EXPERT_AXES by those along STAGE_AXES.
            stage_rank = coordinates.get("edp", 0) * self.ep + coordinates.get("ep", 0)
            for axis in reversed(STAGE_AXES):
                stage_rank, coordinates[axis] = divmod(stage_rank, getattr(self, axis))
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + coordinates.get(axis, 0)
        return rank

    def _rank_in_stage(self, coordinates: Mapping[str, int]) -> int:
        stage_rank = 0
        for axis in STAGE_AXES:
            stage_rank = stage_rank * getattr(self, axis) + coordinates[axis]
        return stage_rank

    def dp_index(self, rank: int) -> int:
        """Return the index of the slice of the batch that a rank reads, from 0 to dp - 1.

        It is the same for all ranks that differ in tp, cp and pp only.
        """
        coordinates = self.coordinates(rank)
        return coordinates["dp_replicate"] * self.dp_shard + coordinates["dp_shard"]

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ along `axes` only, ordered by smallest rank."""
        outer_axes = [axis for axis in AXES if axis not in axes]
        inner_axes = [axis for axis in AXES if axis in axes]
        inner_points = self._points(inner_axes)
        groups = []
        for outer in self._points(outer_axes):
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
