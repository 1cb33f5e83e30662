"""Rank arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.cluster.layout import AXES, Layout
from plait.errors import ConfigError

layouts = st.builds(Layout, **{axis: st.integers(1, 4) for axis in AXES})


@given(layouts)
def test_coordinates_are_a_bijection(layout: Layout) -> None:
    """rank -> coordinates -> rank, and all coordinates differ."""
    seen = {tuple(layout.coordinates(rank).values()) for rank in range(layout.world_size)}
    assert len(seen) == layout.world_size
    for rank in range(layout.world_size):
        assert layout.rank(**layout.coordinates(rank)) == rank


@given(layouts, st.sets(st.sampled_from(AXES), min_size=1))
def test_groups_partition_the_world(layout: Layout, axes: set[str]) -> None:
    """Every rank is in exactly one group, whose members differ in `axes` only."""
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for group in groups:
        fixed = {
            tuple(v for a, v in layout.coordinates(rank).items() if a not in axes) for rank in group
        }
        assert len(fixed) == 1


def test_neighbours_share_a_tensor_parallel_group() -> None:
    """tp is innermost: on nodes of 8 with tp 8, a group is a node."""
    assert Layout(dp_shard=2, tp=8).groups("tp") == (tuple(range(8)), tuple(range(8, 16)))


def test_the_batch_index_ignores_model_axes() -> None:
    """tp and pp partners read the same samples."""
    layout = Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    for group in layout.groups("pp", "tp"):
        assert len({layout.dp_index(rank) for rank in group}) == 1
    assert {layout.dp_index(rank) for rank in range(16)} == {0, 1, 2, 3}


def test_degrees_below_one_are_refused() -> None:
    """With the field, the value and the remedy."""
    with pytest.raises(
        ConfigError, match=r"parallel\.tp = 0: the degree of an axis is at least 1; use 1"
    ):
        Layout(tp=0)
    with pytest.raises(IndexError):
        Layout(tp=2).coordinates(2)
