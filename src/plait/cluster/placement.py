"""Where a layout's groups land on the machines: which stay inside a node, which cross, and what
that costs.

Ranks count through the nodes in order, and tp is the layout's innermost axis, so tensor parallel
groups are neighbours. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.cluster.layout import AXES, Layout
from plait.cluster.machines import Topology
from plait.errors import ConfigError, Problem


@dataclass(frozen=True)
class Crossing:
    """An axis some of whose groups span nodes."""

    axis: str
    groups: int
    of: int


def crossings(layout: Layout, topology: Topology) -> tuple[Crossing, ...]:
    """Every axis of degree above 1 whose groups do not all stay inside a node, outermost first.

    Raises ConfigError when the layout does not fill the machines.
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
    nodes = [index for index, node in enumerate(topology.nodes) for _ in range(node.devices)]
    found = []
    for axis in AXES:
        if getattr(layout, axis) == 1:
            continue
        groups = layout.groups(axis)
        across = sum(len({nodes[rank] for rank in group}) > 1 for group in groups)
        if across:
            found.append(Crossing(axis, across, len(groups)))
    return tuple(found)


def refuse_wider_than_a_node(layout: Layout, topology: Topology) -> None:
    """Raise ConfigError where tp is larger than every machine: each layer would wait for the links
    between machines.
    """
    largest = max(node.devices for node in topology.nodes)
    if layout.tp > largest:
        fitting = max(
            degree
            for degree in range(1, largest + 1)
            if all(node.devices % degree == 0 for node in topology.nodes)
        )
        rule = f"the largest machine has {largest} devices, and tensor parallelism needs its links"
        raise ConfigError(Problem("parallel.tp", layout.tp, rule, f"use {fitting}"))


def warning(layout: Layout, topology: Topology) -> str | None:
    """The warning for tensor parallel groups that span nodes; None where they do not."""
    crossing = next((c for c in crossings(layout, topology) if c.axis == "tp"), None)
    if crossing is None:
        return None
    smallest = min(node.devices for node in topology.nodes)
    fitting = [
        degree
        for degree in range(1, layout.tp)
        if all(node.devices % degree == 0 for node in topology.nodes)
    ]
    return (
        f"parallel.tp = {layout.tp}: {crossing.groups} of {crossing.of} tensor parallel groups span"
        f" nodes (the smallest has {smallest} devices), and every layer communicates over the links"
        " between them, two all-reduces of the activations forward and two backward; use"
        f" {max(fitting)} to stay inside"
    )


def grid(layout: Layout, topology: Topology) -> list[list[str]]:
    """Rows for printing: node, then one cell a device, `rank pp.dp.cp.tp` with the axes of degree
    above 1.
    """
    used = [axis for axis in AXES if getattr(layout, axis) > 1]
    rows = []
    rank = 0
    for node in topology.nodes:
        cells = []
        for _ in range(node.devices):
            at = layout.coordinates(rank)
            cells.append(
                f"{rank} " + " ".join(f"{axis}{at[axis]}" for axis in used) if used else str(rank)
            )
            rank += 1
        rows.append([node.name, *cells])
    return rows
