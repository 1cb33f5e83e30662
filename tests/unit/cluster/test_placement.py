"""Coordinates and groups of ranks, and their placement on machines."""

from itertools import chain

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
    distinct = set()
    for rank in range(layout.world_size):
        coordinates = layout.coordinates(rank)
        assert layout.rank(**coordinates) == rank
        distinct.add(tuple(coordinates.values()))
    assert len(distinct) == layout.world_size


@given(layouts, st.sets(st.sampled_from(AXES), min_size=1))
def test_groups_partition_the_world(layout, axes):
    """Every rank is in exactly one group, whose members differ in `axes` only."""
    groups = layout.groups(*axes)
    assert sorted(chain.from_iterable(groups)) == list(range(layout.world_size))
    for group in groups:
        first, *others = map(layout.coordinates, group)
        for axis in set(AXES) - axes:
            assert all(coordinates[axis] == first[axis] for coordinates in others)


def test_neighbours_share_a_tensor_parallel_group():
    """tp is the innermost axis: on nodes of 8 with tp 8, a group is a node."""
    assert Layout(dp_shard=2, tp=8).groups("tp") == (tuple(range(8)), tuple(range(8, 16)))


def test_the_data_parallel_index_ignores_model_axes():
    """The ranks of a tp and pp group read the same samples."""
    layout = Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    for group in layout.groups("pp", "tp"):
        assert len({layout.dp_index(rank) for rank in group}) == 1
    assert {layout.dp_index(rank) for rank in range(16)} == {0, 1, 2, 3}


def test_degrees_below_one_are_refused():
    message = r"parallel\.tp = 0: the degree of an axis is at least 1; use 1"
    with pytest.raises(ConfigError, match=message):
        Layout(tp=0)
    with pytest.raises(IndexError):
        Layout(tp=2).coordinates(2)


def machines(*devices):
    """Return a topology of nodes with these numbers of devices."""
    return Topology(tuple(Node(f"node{i}", count) for i, count in enumerate(devices)), "cuda")


@st.composite
def layouts_on_machines(draw):
    """Draw 1 to 5 nodes, even or uneven, and a layout that fills them."""
    topology = machines(*draw(st.lists(st.integers(1, 8), min_size=1, max_size=5)))
    remaining = topology.world_size
    degrees = {}
    for axis in ("tp", "cp", "dp_replicate", "pp"):
        divisors = [d for d in range(1, remaining + 1) if remaining % d == 0]
        degrees[axis] = draw(st.sampled_from(divisors))
        remaining //= degrees[axis]
    return Layout(dp_shard=remaining, **degrees), topology


@given(layouts_on_machines())
def test_tensor_parallel_stays_inside_a_node_if_possible(drawn):
    """If tp divides every node, no group crosses nodes. Otherwise a smaller degree is suggested."""
    layout, topology = drawn
    node_of = []
    for index, node in enumerate(topology.nodes):
        node_of += [index] * node.devices
    crossing = 0
    for group in layout.groups("tp"):
        crossing += node_of[group[0]] != node_of[group[-1]]
    assert crossings(layout, topology).get("tp", 0) == crossing

    def divides_every_node(degree):
        return all(node.devices % degree == 0 for node in topology.nodes)

    if divides_every_node(layout.tp):
        assert crossing == 0
    warning = crossing_warning(layout, topology)
    assert (warning is None) == (crossing == 0)
    if warning is not None:
        suggested = int(warning.rsplit("use ", 1)[1].split()[0])
        assert suggested < layout.tp
        assert divides_every_node(suggested)


def test_data_parallel_crosses_before_tensor_parallel():
    """Replicas are on different nodes, and shards are on one node."""
    layout = Layout(dp_replicate=2, dp_shard=2, tp=4)
    assert list(crossings(layout, machines(8, 8))) == ["dp_replicate"]


def test_wider_than_a_node_is_refused():
    message = r"parallel\.tp = 8: the largest machine has 4 devices, .*; use 4"
    with pytest.raises(ConfigError, match=message):
        refuse_wider_than_a_node(Layout(tp=8), machines(4, 4))
    refuse_wider_than_a_node(Layout(dp_shard=2, tp=4), machines(4, 4))


def test_rank_grid():
    """The grid has a row per node."""
    rows = rank_grid(Layout(dp_shard=2, tp=2), machines(2, 2))
    assert rows == [
        ["node0", "0 dp_shard0 tp0", "1 dp_shard0 tp1"],
        ["node1", "2 dp_shard1 tp0", "3 dp_shard1 tp1"],
    ]


def test_a_wrong_number_of_processes_is_refused():
    """The messages have singular and plural."""
    with pytest.raises(ConfigError, match="needs 4 processes and the machines have 3 devices"):
        crossings(Layout(tp=4), machines(3))
    with pytest.raises(ConfigError, match="needs 1 process and the machines have 3 devices"):
        crossings(Layout(), machines(3))
    with pytest.raises(ConfigError, match="needs 2 processes and the machines have 1 device;"):
        crossings(Layout(tp=2), machines(1))
    with pytest.raises(ConfigError, match="the largest machine has 1 device, and"):
        refuse_wider_than_a_node(Layout(tp=2), machines(1, 1))
    assert "(the smallest has 1 device)" in str(crossing_warning(Layout(tp=2), machines(1, 1)))
