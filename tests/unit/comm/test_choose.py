"""Which way the chooser takes on clusters as they exist, and why. Link figures are data sheets' with usual efficiencies."""

from __future__ import annotations

import pytest

from plait.comm.choose import choose_all_reduce, prices
from plait.comm.links import Cost, GroupLinks, Level, Link, describe
from plait.units import KIB, MIB

NVLINK = Link(3e-6, 360e9)
PCIE = Link(5e-6, 12e9)
ETHERNET = Link(50e-6, 0.118e9)
INFINIBAND = Link(5e-6, 8 * 45e9)

NVLINK_NODE = describe("dp_replicate", machines=1, per_machine=8, inside=NVLINK)
PCIE_NODE = describe("dp_replicate", machines=1, per_machine=4, inside=PCIE)
TWO_NODES_ON_ETHERNET = describe("dp_replicate", machines=2, per_machine=8, inside=PCIE, network=ETHERNET)
SIXTY_FOUR_NODES = describe("dp_replicate", machines=64, per_machine=8, inside=NVLINK, network=INFINIBAND)


@pytest.mark.parametrize(
    ("group", "nbytes", "expected"),
    [
        (NVLINK_NODE, 25 * MIB, "all-reduce"),
        (NVLINK_NODE, 4 * KIB, "recursive-doubling"),
        (PCIE_NODE, 25 * MIB, "all-reduce"),
        (TWO_NODES_ON_ETHERNET, 25 * MIB, "two-level"),
        (SIXTY_FOUR_NODES, 25 * MIB, "two-level"),
        (SIXTY_FOUR_NODES, 16_000 * MIB, "all-reduce"),
    ],
)
def test_exact_ways(group: GroupLinks, nbytes: int, expected: str) -> None:
    choice = choose_all_reduce(nbytes, group)
    assert choice.algorithm == expected, choice.reason
    assert choice.seconds == min(prices(nbytes, group).values())
    assert expected in choice.reason
    assert [seconds for _, seconds in choice.others] == sorted(seconds for _, seconds in choice.others)


def test_two_levels_halve_the_time_on_ethernet() -> None:
    """Two machines: across goes S once, and 15/8 S in a flat ring."""
    found = prices(100 * MIB, TWO_NODES_ON_ETHERNET)
    assert found["all-reduce"] / found["two-level"] == pytest.approx(15 / 8, rel=0.05)
    assert "1/8 of the bytes" in choose_all_reduce(100 * MIB, TWO_NODES_ON_ETHERNET).reason


def test_compression_only_where_it_is_allowed_and_pays() -> None:
    on_gpus = 2e-11
    assert choose_all_reduce(25 * MIB, TWO_NODES_ON_ETHERNET).algorithm != "int8"
    assert choose_all_reduce(25 * MIB, TWO_NODES_ON_ETHERNET, lossy=True).algorithm == "int8"
    assert choose_all_reduce(25 * MIB, NVLINK_NODE, lossy=True, quantise_seconds_per_byte=on_gpus).algorithm == "all-reduce"


def test_it_changes_when_the_links_change() -> None:
    slower = describe("dp_replicate", machines=64, per_machine=8, inside=NVLINK, network=Link(5e-6, 3e9))
    assert choose_all_reduce(16_000 * MIB, slower).algorithm == "two-level"
    assert choose_all_reduce(16_000 * MIB, SIXTY_FOUR_NODES).algorithm == "all-reduce"


def test_shared_memory_where_it_was_measured() -> None:
    whole = Level(2, {**PCIE_NODE.whole.costs, "shared_memory": Cost(1e-5, 1e-11)})
    choice = choose_all_reduce(MIB, GroupLinks("dp_replicate", 1, 2, whole))
    assert choice.algorithm == "shared-memory"


def test_buckets_grow_with_latency() -> None:
    """The fixed time is at most a tenth."""
    near, far = choose_all_reduce(25 * MIB, PCIE_NODE), choose_all_reduce(25 * MIB, SIXTY_FOUR_NODES)
    assert near.bucket_bytes < far.bucket_bytes
    for group, choice in ((PCIE_NODE, near), (TWO_NODES_ON_ETHERNET, choose_all_reduce(25 * MIB, TWO_NODES_ON_ETHERNET))):
        fixed = prices(0, group)[choice.algorithm]
        assert fixed <= 0.11 * prices(choice.bucket_bytes, group)[choice.algorithm]
