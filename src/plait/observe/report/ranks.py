"""Which rank sits where: a row a machine, a cell a device, tensor-parallel groups framed, pipeline
stages in colours.

Machines in a row that hold the same stages are one row where there are many of them.
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
from plait.observe.templating import part

_MOST_ROWS = 16
"""More machines than this are drawn as one row for each run of equal ones."""
_MOST_RUNS = 64
_COLOURS = 8
_SHORT = {"dp_replicate": "rep", "dp_shard": "shard"}


@dataclass(frozen=True)
class Run:
    """Machines in a row whose devices hold the same stages."""

    first_node: int
    last_node: int
    ranks: range
    """Of the first of them."""


def rank_grid(layout: Layout, topology: Topology) -> Markup:
    """The drawing, what of it crosses machines, and a key to the axes."""
    found = runs(layout, topology)
    shown = found[:_MOST_RUNS]
    grid = part("ranks", [_machine(run, layout) for run in shown])
    lines = [page.note(line) for line in _said(layout, topology, found, shown)]
    wide = warning(layout, topology)
    return page.join(*lines, page.warning(wide) if wide else Markup(""), grid)


def runs(layout: Layout, topology: Topology) -> list[Run]:
    """Machines in rank order; where they are more than a page shows, consecutive ones that hold the
    same stages together.
    """
    found: list[Run] = []
    held: tuple[int, ...] | None = None
    start = 0
    for index, node in enumerate(topology.nodes):
        ranks = range(start, start + node.devices)
        start += node.devices
        stages = tuple(layout.coordinates(rank)["pp"] for rank in ranks)
        if len(topology.nodes) > _MOST_ROWS and stages == held:
            found[-1] = Run(found[-1].first_node, index, found[-1].ranks)
        else:
            found.append(Run(index, index, ranks))
        held = stages
    return found


def _said(
    layout: Layout, topology: Topology, found: Sequence[Run], shown: Sequence[Run]
) -> list[str]:
    lines = [
        f"{topology.world_size:,} ranks on {len(topology.nodes):,} machines: {layout}. Ranks count"
        " through the machines in order."
    ]
    if layout.tp > 1:
        lines[0] += " A frame is a tensor-parallel group."
    if layout.pp > 1:
        lines[0] += " A colour is a pipeline rank."
    crossed = [f"{c.axis} ({c.groups:,} of {c.of:,} groups)" for c in crossings(layout, topology)]
    if crossed:
        lines.append(
            f"Groups that span machines: {', '.join(crossed)}; all others stay inside one."
        )
    if any(run.last_node > run.first_node for run in found):
        lines.append(
            "A row with several machines shows the first of them; the others hold the same stages,"
            " for other parts of the batch."
        )
    if len(shown) < len(found):
        lines.append(f"The first {len(shown)} of {len(found)} rows.")
    return lines


def _machine(run: Run, layout: Layout) -> dict[str, Any]:
    """What the row of a run shows."""
    several = run.last_node > run.first_node
    places = [layout.coordinates(rank) for rank in run.ranks]
    shared = [
        axis for axis in AXES if getattr(layout, axis) > 1 and len({at[axis] for at in places}) == 1
    ]
    groups: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for rank, at in zip(run.ranks, places, strict=True):
        groups.setdefault(tuple(at[axis] for axis in AXES if axis != "tp"), []).append(
            _cell(rank, layout, shared)
        )
    return {
        "name": (
            f"machines {run.first_node} to {run.last_node}"
            if several
            else f"machine {run.first_node}"
        ),
        "beside": ", ".join(
            _named(axis, places[0][axis]) for axis in shared if axis == "pp" or not several
        ),
        "groups": list(groups.values()),
        "framed": layout.tp > 1,
    }


def _named(axis: str, place: int) -> str:
    return f"{_SHORT.get(axis, axis)} {place}"


def _cell(rank: int, layout: Layout, shared: Sequence[str]) -> dict[str, Any]:
    """A rank with its place on the axes; those that the whole row shares are in its title alone."""
    at = layout.coordinates(rank)
    used = [axis for axis in AXES if getattr(layout, axis) > 1]
    return {
        "number": rank,
        "stage": at["pp"] % _COLOURS,
        "title": ", ".join(_named(axis, at[axis]) for axis in used) or "alone",
        "words": [_named(axis, at[axis]) for axis in used if axis not in shared],
    }
