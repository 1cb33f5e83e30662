"""Topology-aware placement (MISSION T5), over random machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.cluster.layout import (
    Layout,
    crossing_warning,
    crossings,
    rank_grid,
    refuse_wider_than_a_node,
)
from plait.cluster.machines import Node, Topology
from plait.errors import ConfigError


def machines(*devices: int) -> Topology:
    """Nodes of the given sizes."""
    return Topology(tuple(Node(f"node{i}", count) for i, count in enumerate(devices)), "cuda")


@st.composite
def layouts_on_machines(draw: st.DrawFn) -> tuple[Layout, Topology]:
    """1 to 5 nodes, even or uneven, and a layout that fills them."""
    topology = machines(*draw(st.lists(st.integers(1, 8), min_size=1, max_size=5)))
    left = topology.world_size
    degrees = {}
    for axis in ("tp", "cp", "dp_replicate", "pp"):
        degrees[axis] = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        left //= degrees[axis]
    return Layout(dp_shard=left, **degrees), topology


@given(layouts_on_machines())
def test_tensor_parallel_stays_inside_a_node_wherever_it_can(
    drawn: tuple[Layout, Topology],
) -> None:
    """If tp divides every node, no group crosses; if one crosses, that is said, with a degree that would not."""
    layout, topology = drawn
    crossing = crossings(layout, topology)
    nodes = [index for index, node in enumerate(topology.nodes) for _ in range(node.devices)]
    across = sum(len({nodes[r] for r in group}) > 1 for group in layout.groups("tp"))
    assert crossing.get("tp", 0) == across
    if all(node.devices % layout.tp == 0 for node in topology.nodes):
        assert across == 0
    said = crossing_warning(layout, topology)
    assert (said is None) == (across == 0)
    if said is not None:
        better = int(said.rsplit("use ", 1)[1].split()[0])
        assert better < layout.tp and all(node.devices % better == 0 for node in topology.nodes)


def test_data_parallel_crosses_before_tensor_parallel() -> None:
    """Two nodes of 8, tp 4: shards and tp inside, replicas across."""
    layout = Layout(dp_replicate=2, dp_shard=2, tp=4)
    assert list(crossings(layout, machines(8, 8))) == ["dp_replicate"]


def test_wider_than_a_node_is_refused() -> None:
    """With the widest degree that fits."""
    with pytest.raises(
        ConfigError, match=r"parallel\.tp = 8: the largest machine has 4 devices, .*; use 4"
    ):
        refuse_wider_than_a_node(Layout(tp=8), machines(4, 4))
    refuse_wider_than_a_node(Layout(dp_shard=2, tp=4), machines(4, 4))


def test_grid_and_mismatch() -> None:
    """A row a node."""
    rows = rank_grid(Layout(dp_shard=2, tp=2), machines(2, 2))
    assert rows == [
        ["node0", "0 dp_shard0 tp0", "1 dp_shard0 tp1"],
        ["node1", "2 dp_shard1 tp0", "3 dp_shard1 tp1"],
    ]
    with pytest.raises(ConfigError, match="needs 4 processes and the machines have 3 devices"):
        crossings(Layout(tp=4), machines(3))
