"""Drawing of the ranks on the machines.

There is one row per machine and one cell per device. Frames show tensor-parallel groups, and
colours show pipeline ranks. If there are many machines, consecutive machines with the same stages
share a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from plait.cluster.layout import AXES, Layout
from plait.cluster.machines import Topology
from plait.cluster.placement import crossings, warning
from plait.observe.report import page
from plait.observe.templating import render_macro

_MAX_MACHINES = 16
"""Largest number of machines that have a row each."""
_MAX_ROWS = 64
_COLOURS = 8
_AXIS_LABELS = {"dp_replicate": "rep", "dp_shard": "shard"}


@dataclass(frozen=True)
class MachineRow:
    """Consecutive machines whose devices hold the same pipeline stages."""

    first_node: int
    last_node: int
    ranks: range
    """Ranks of the first machine."""


def rank_grid(layout: Layout, topology: Topology) -> Markup:
    """Draw the ranks on the machines, with notes about groups that span machines.

    Args:
        layout: Degrees of the parallel axes.
        topology: Machines in the order of the ranks.
    """
    rows = machine_rows(layout, topology)
    shown = rows[:_MAX_ROWS]
    elements = [page.note(line) for line in _notes(layout, topology, rows, shown)]
    text = warning(layout, topology)
    if text:
        elements.append(page.warning(text))
    elements.append(render_macro("ranks", [_machine_values(row, layout) for row in shown]))
    return page.join(*elements)


def machine_rows(layout: Layout, topology: Topology) -> list[MachineRow]:
    """Return the rows of the drawing in the order of the ranks.

    If there are more machines than a page shows, consecutive machines with the same stages share a
    row.
    """
    rows: list[MachineRow] = []
    previous_stages: tuple[int, ...] | None = None
    start = 0
    for index, node in enumerate(topology.nodes):
        ranks = range(start, start + node.devices)
        start += node.devices
        stages = tuple(layout.coordinates(rank)["pp"] for rank in ranks)
        if len(topology.nodes) > _MAX_MACHINES and stages == previous_stages:
            rows[-1] = MachineRow(rows[-1].first_node, index, rows[-1].ranks)
        else:
            rows.append(MachineRow(index, index, ranks))
        previous_stages = stages
    return rows


def _notes(
    layout: Layout,
    topology: Topology,
    rows: Sequence[MachineRow],
    shown: Sequence[MachineRow],
) -> list[str]:
    lines = [
        f"{topology.world_size:,} ranks on {len(topology.nodes):,} machines: {layout}. Ranks count"
        " through the machines in order."
    ]
    if layout.tp > 1:
        lines[0] += " A frame is a tensor-parallel group."
    if layout.pp > 1:
        lines[0] += " A colour is a pipeline rank."
    spanning = [
        f"{crossing.axis} ({crossing.groups:,} of {crossing.of:,} groups)"
        for crossing in crossings(layout, topology)
    ]
    if spanning:
        lines.append(
            f"Groups that span machines: {', '.join(spanning)}; all others stay inside one."
        )
    if any(row.last_node > row.first_node for row in rows):
        lines.append(
            "A row with several machines shows the first of them; the others hold the same stages,"
            " for other parts of the batch."
        )
    if len(shown) < len(rows):
        lines.append(f"The first {len(shown)} of {len(rows)} rows.")
    return lines


def _machine_values(row: MachineRow, layout: Layout) -> dict[str, Any]:
    """Return the values of the template for a row."""
    coordinates = [layout.coordinates(rank) for rank in row.ranks]
    shared_axes = [
        axis
        for axis in _parallel_axes(layout)
        if all(rank[axis] == coordinates[0][axis] for rank in coordinates)
    ]
    groups: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for rank, position in zip(row.ranks, coordinates, strict=True):
        group = tuple(position[axis] for axis in AXES if axis != "tp")
        groups.setdefault(group, []).append(_cell_values(rank, layout, shared_axes))

    name = f"machine {row.first_node}"
    label_axes = shared_axes
    if row.last_node > row.first_node:
        name = f"machines {row.first_node} to {row.last_node}"
        # Machines of a row share their stages, but not their coordinates on the other axes.
        label_axes = [axis for axis in shared_axes if axis == "pp"]
    return {
        "name": name,
        "label": ", ".join(_coordinate(axis, coordinates[0][axis]) for axis in label_axes),
        "groups": list(groups.values()),
        "framed": layout.tp > 1,
    }


def _cell_values(rank: int, layout: Layout, shared_axes: Sequence[str]) -> dict[str, Any]:
    """Return the values of the template for a rank.

    Coordinates that are equal in the whole row are only in the tooltip.
    """
    position = layout.coordinates(rank)
    axes = _parallel_axes(layout)
    return {
        "number": rank,
        "stage": position["pp"] % _COLOURS,
        "title": ", ".join(_coordinate(axis, position[axis]) for axis in axes) or "alone",
        "coordinates": [
            _coordinate(axis, position[axis]) for axis in axes if axis not in shared_axes
        ],
    }


def _parallel_axes(layout: Layout) -> list[str]:
    return [axis for axis in AXES if getattr(layout, axis) > 1]


def _coordinate(axis: str, index: int) -> str:
    return f"{_AXIS_LABELS.get(axis, axis)} {index}"
