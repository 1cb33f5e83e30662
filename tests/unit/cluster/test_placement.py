"""Rank arithmetic, and where ranks are placed on machines (MISSION T5)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.cluster.layout import (
    AXES,
    Layout,
    crossing_warning,
    crossings,
    rank_grid,
    refuse_wider_than_a_node,
)
from plait.cluster.machines import Node, Topology
from plait.errors import ConfigError

layouts = st.builds(Layout, **{axis: st.integers(1, 4) for axis in AXES})


@given(layouts)
def test_coordinates_are_a_bijection(layout):
    """rank -> coordinates -> rank, and all coordinates differ."""
    seen = {tuple(layout.coordinates(rank).values()) for rank in range(layout.world_size)}
    assert len(seen) == layout.world_size
    for rank in range(layout.world_size):
        assert layout.rank(**layout.coordinates(rank)) == rank


@given(layouts, st.sets(st.sampled_from(AXES), min_size=1))
def test_groups_partition_the_world(layout, axes):
    """Every rank is in exactly one group, whose members differ in `axes` only."""
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for group in groups:
        fixed = {
            tuple(v for a, v in layout.coordinates(rank).items() if a not in axes) for rank in group
        }
        assert len(fixed) == 1


def test_neighbours_share_a_tensor_parallel_group():
    """tp is innermost: on nodes of 8 with tp 8, a group is a node."""
    assert Layout(dp_shard=2, tp=8).groups("tp") == (tuple(range(8)), tuple(range(8, 16)))


def test_the_batch_index_ignores_model_axes():
    """tp and pp partners read the same samples."""
    layout = Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    for group in layout.groups("pp", "tp"):
        assert len({layout.dp_index(rank) for rank in group}) == 1
    assert {layout.dp_index(rank) for rank in range(16)} == {0, 1, 2, 3}


def test_degrees_below_one_are_refused():
    """With the field, the value and the remedy."""
    words = r"parallel\.tp = 0: the degree of an axis is at least 1; use 1"
    with pytest.raises(ConfigError, match=words):
        Layout(tp=0)
    with pytest.raises(IndexError):
        Layout(tp=2).coordinates(2)


def machines(*devices):
    """Nodes of the given sizes."""
    return Topology(tuple(Node(f"node{i}", count) for i, count in enumerate(devices)), "cuda")


@st.composite
def layouts_on_machines(draw):
    """1 to 5 nodes, even or uneven, and a layout that fills them."""
    topology = machines(*draw(st.lists(st.integers(1, 8), min_size=1, max_size=5)))
    left = topology.world_size
    degrees = {}
    for axis in ("tp", "cp", "dp_replicate", "pp"):
        degrees[axis] = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        left //= degrees[axis]
    return Layout(dp_shard=left, **degrees), topology


@given(layouts_on_machines())
def test_tensor_parallel_stays_inside_a_node_wherever_it_can(drawn):
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


def test_data_parallel_crosses_before_tensor_parallel():
    """Two nodes of 8, tp 4: shards and tp inside, replicas across."""
    layout = Layout(dp_replicate=2, dp_shard=2, tp=4)
    assert list(crossings(layout, machines(8, 8))) == ["dp_replicate"]


def test_wider_than_a_node_is_refused():
    """With the widest degree that fits."""
    words = r"parallel\.tp = 8: the largest machine has 4 devices, .*; use 4"
    with pytest.raises(ConfigError, match=words):
        refuse_wider_than_a_node(Layout(tp=8), machines(4, 4))
    refuse_wider_than_a_node(Layout(dp_shard=2, tp=4), machines(4, 4))


def test_grid_and_mismatch():
    """A row a node."""
    rows = rank_grid(Layout(dp_shard=2, tp=2), machines(2, 2))
    assert rows == [
        ["node0", "0 dp_shard0 tp0", "1 dp_shard0 tp1"],
        ["node1", "2 dp_shard1 tp0", "3 dp_shard1 tp1"],
    ]
    with pytest.raises(ConfigError, match="needs 4 processes and the machines have 3 devices"):
        crossings(Layout(tp=4), machines(3))


def test_one_process_and_one_device_are_singular():
    with pytest.raises(ConfigError, match="needs 1 process and the machines have 3 devices"):
        crossings(Layout(), machines(3))
    with pytest.raises(ConfigError, match="needs 2 processes and the machines have 1 device;"):
        crossings(Layout(tp=2), machines(1))
    with pytest.raises(ConfigError, match="the largest machine has 1 device, and"):
        refuse_wider_than_a_node(Layout(tp=2), machines(1, 1))
    assert "(the smallest has 1 device)" in str(crossing_warning(Layout(tp=2), machines(1, 1)))
