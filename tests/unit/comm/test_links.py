"""Costs of links: fits of measured times, costs derived from data sheets, and their file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.comm.choose import (
    Cost,
    GroupLinks,
    Level,
    Link,
    describe,
    fit,
    load_with_facts,
    measured_cost,
    ring_level,
    save,
)
from plait.errors import InputError


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-7))
def test_a_fit_recovers_the_model(fixed, per_byte):
    cost = Cost(fixed, per_byte)
    fitted = fit([(size, cost.seconds(size)) for size in (1_000, 30_000, 1_000_000, 30_000_000)])
    for size in (500, 10_000_000):
        assert fitted.seconds(size) == pytest.approx(cost.seconds(size), rel=1e-6)


def test_a_fit_minimises_relative_errors():
    """An error of 10 % counts equally for a small and a large message."""
    samples = [(1_000, 110e-6), (1_000, 90e-6), (100_000_000, 0.11), (100_000_000, 0.09)]
    fitted = fit(samples)
    assert fitted.seconds(1_000) == pytest.approx(100e-6, rel=0.03)
    assert fitted.seconds(100_000_000) == pytest.approx(0.1, rel=0.03)


@pytest.mark.parametrize("samples", [[(1_000, 2.0), (2_000, 1.0)], [(1_000, 1.0), (2_000, 4.0)]])
def test_no_negative_costs(samples):
    fitted = fit(samples)
    assert fitted.fixed_seconds >= 0
    assert fitted.seconds_per_byte >= 0


def test_a_fit_needs_two_sizes():
    with pytest.raises(ValueError, match="two sizes"):
        fit([(1000, 1.0), (1000, 2.0)])


def test_a_measured_cost_interpolates_its_samples():
    """This backend changes its protocol at 1 MB.

    Beyond the last size the slope is that of all samples. More bytes never take less time.
    """
    cost = measured_cost([(1_000_000, 2e-3), (1_000, 1e-4), (4_000_000, 5e-3), (100_000, 0.9e-4)])
    samples = ((1_000, 0.9e-4), (100_000, 0.9e-4), (1_000_000, 2e-3), (4_000_000, 5e-3))
    assert cost.samples == samples
    for nbytes, seconds in (*samples, (2_500_000, 3.5e-3), (7_999_000, 9.91e-3)):
        assert cost.seconds(nbytes) == pytest.approx(seconds)
    assert 0 <= cost.seconds(10) <= 1e-4


def test_costs_of_a_ring():
    level = ring_level(4, Link(1e-6, 1e9))
    assert level.costs["all_reduce"].seconds(8e9) == pytest.approx(6e-6 + 2 * 3 / 4 * 8)
    assert level.costs["all_gather"].seconds(8e9) == pytest.approx(3e-6 + 3 / 4 * 8)


def test_ranks_of_a_machine_share_its_network():
    """Each of four ranks has a quarter of it, because all use it at the same time."""
    group = describe(
        "dp", machines=3, per_machine=4, inside=Link(1e-6, 1e11), network=Link(1e-5, 1e9)
    )
    assert group.ranks == 12
    assert group.across.costs["all_reduce"].seconds(1e9) == pytest.approx(4e-5 + 2 * 2 / 3 * 4)
    assert group.whole.costs["all_reduce"].seconds(0) == pytest.approx(2 * (9 * 1e-6 + 2 * 1e-5))
    assert group.whole.costs["all_reduce"].seconds_per_byte == pytest.approx(2 * 11 / 12 / 1e9)


def test_save_and_load(tmp_path):
    inside = Link(1e-6, 1e10)
    network = Link(1e-5, 1e9)
    groups = [
        describe("dp_replicate", machines=2, per_machine=2, inside=inside, network=network),
        describe("dp_shard", machines=1, per_machine=2, inside=inside),
    ]
    path = tmp_path / "links.json"
    save(path, groups, facts={"at": "now"})
    assert load_with_facts(path)[0] == {group.axis: group for group in groups}
    costs = {"ring": measured_cost([(1, 1.0), (2, 3.0)])}
    measured = GroupLinks("dp_replicate", 1, 2, Level(2, costs))
    save(path, [measured], facts={"hosts": ["a", "b"]})
    assert load_with_facts(path) == ({"dp_replicate": measured}, {"hosts": ["a", "b"]})

    path.write_text("{}")
    with pytest.raises(InputError, match="remove the file to measure the links again"):
        load_with_facts(path)
