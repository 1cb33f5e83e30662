"""Placement of a layout's groups on machines: which groups span several, and at what cost.

Ranks are numbered machine by machine, and tp is the innermost dimension of a layout, so the ranks
of a tensor-parallel group are neighbours. The module only computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait.cluster.layout import AXES, Layout
from plait.cluster.machines import Topology
from plait.errors import ConfigError, Problem


@dataclass(frozen=True)
class Crossing:
    """Mesh dimension with groups that span machines.

    Attributes:
        axis: Name of the dimension.
        groups: Number of groups that span machines.
        of: Number of all groups.
    """

    axis: str
    groups: int
    of: int


def crossings(layout: Layout, topology: Topology) -> tuple[Crossing, ...]:
    """Return every dimension with groups that span machines, outermost first.

    Raises:
        ConfigError: The layout does not fill the machines.
    """
    if layout.world_size != topology.world_size:
        rule = (
            f"the layout needs {layout.world_size} processes and the machines have"
            f" {topology.world_size} devices"
        )
        raise ConfigError(
            Problem(
                "parallel", str(layout), rule, f"use a product of degrees of {topology.world_size}"
            )
        )

    node_of_rank: list[int] = []
    for index, node in enumerate(topology.nodes):
        node_of_rank += [index] * node.devices
    crossing_axes = []
    for axis in AXES:
        if getattr(layout, axis) == 1:
            continue
        groups = layout.groups(axis)
        spanning = sum(len({node_of_rank[rank] for rank in group}) > 1 for group in groups)
        if spanning:
            crossing_axes.append(Crossing(axis, spanning, len(groups)))
    return tuple(crossing_axes)


def refuse_wider_than_a_node(layout: Layout, topology: Topology) -> None:
    """Check that tp fits on a machine.

    Every layer would wait for the links between machines otherwise.

    Raises:
        ConfigError: tp is larger than every machine.
    """
    largest = max(node.devices for node in topology.nodes)
    if layout.tp > largest:
        fitting = max(_tp_inside_nodes(topology, largest))
        rule = f"the largest machine has {largest} devices, and tensor parallelism needs its links"
        raise ConfigError(Problem("parallel.tp", layout.tp, rule, f"use {fitting}"))


def warning(layout: Layout, topology: Topology) -> str | None:
    """Return a warning about tensor-parallel groups that span machines, or None."""
    crossing = next((c for c in crossings(layout, topology) if c.axis == "tp"), None)
    if crossing is None:
        return None
    smallest = min(node.devices for node in topology.nodes)
    fitting = max(_tp_inside_nodes(topology, layout.tp - 1))
    return (
        f"parallel.tp = {layout.tp}: {crossing.groups} of {crossing.of} tensor parallel groups span"
        f" nodes (the smallest has {smallest} devices), and every layer communicates over the links"
        " between them, two all-reduces of the activations forward and two backward; use"
        f" {fitting} to stay inside"
    )


def _tp_inside_nodes(topology: Topology, largest: int) -> list[int]:
    """Return the degrees of tp up to `largest` with which no group spans machines."""
    # Groups are neighbouring ranks, so no group spans machines if the degree divides all of them.
    common = math.gcd(*(node.devices for node in topology.nodes))
    return [degree for degree in range(1, largest + 1) if common % degree == 0]


def grid(layout: Layout, topology: Topology) -> list[list[str]]:
    """Return a table of the ranks on each machine, for printing.

    Returns:
        One row per machine: its name, and one cell per device with the rank and its coordinates
        along the dimensions of degree above 1.
    """
    used = [axis for axis in AXES if getattr(layout, axis) > 1]
    rows = []
    rank = 0
    for node in topology.nodes:
        cells = []
        for _ in range(node.devices):
            coordinates = layout.coordinates(rank)
            labels = [f"{axis}{coordinates[axis]}" for axis in used]
            cells.append(" ".join([str(rank), *labels]))
            rank += 1
        rows.append([node.name, *cells])
    return rows
