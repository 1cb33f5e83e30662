"""Choice of all-reduce algorithms and bucket sizes.

The figures of the clusters and their sources are in topologies.json.
"""

import pytest

from plait.comm.choose import (
    Cost,
    GroupLinks,
    Level,
    Link,
    algorithm_seconds,
    choose_all_reduce,
    choose_buckets,
    describe,
    measured_cost,
    refined,
)
from plait.sizes import KIB, MIB
from tools.choice_table import DOCUMENT, topologies, written

NVLINK_NODE, PCIE_NODE, TWO_NODES_ON_ETHERNET, SIXTY_FOUR_NODES = topologies().values()
NVLINK = Link(3e-6, 360e9)


@pytest.mark.parametrize(
    ("group", "nbytes", "expected"),
    [
        (NVLINK_NODE, 25 * MIB, "all-reduce"),
        (NVLINK_NODE, 4 * KIB, "recursive-doubling"),
        (PCIE_NODE, 25 * MIB, "all-reduce"),
        (TWO_NODES_ON_ETHERNET, 25 * MIB, "hierarchical"),
        (SIXTY_FOUR_NODES, 25 * MIB, "hierarchical"),
        (SIXTY_FOUR_NODES, 16_000 * MIB, "all-reduce"),
    ],
)
def test_algorithm_of_a_cluster(group, nbytes, expected):
    choice = choose_all_reduce(nbytes, group)
    assert choice.algorithm == expected, choice.reason
    assert choice.seconds == min(algorithm_seconds(nbytes, group).values())
    assert expected in choice.reason
    others = [seconds for _, seconds in choice.others]
    assert others == sorted(others)


def test_two_levels_halve_the_time_on_ethernet():
    """The hierarchical algorithm sends all bytes once between machines, and a ring 15/8 times."""
    seconds = algorithm_seconds(100 * MIB, TWO_NODES_ON_ETHERNET)
    assert seconds["all-reduce"] / seconds["hierarchical"] == pytest.approx(15 / 8, rel=0.05)
    assert "1/8 of the bytes" in choose_all_reduce(100 * MIB, TWO_NODES_ON_ETHERNET).reason


def test_the_choice_follows_the_links():
    network = Link(5e-6, 3e9)
    slower = describe("dp_replicate", machines=64, per_machine=8, inside=NVLINK, network=network)
    assert choose_all_reduce(16_000 * MIB, slower).algorithm == "hierarchical"
    assert choose_all_reduce(16_000 * MIB, SIXTY_FOUR_NODES).algorithm == "all-reduce"


def links_of(ranks, costs):
    return GroupLinks("dp_replicate", 1, ranks, Level(ranks, costs))


def measured(**milliseconds):
    """Return links with the milliseconds that each algorithm takes for a MiB."""
    costs = {}
    for name, time in milliseconds.items():
        cost = measured_cost([(MIB // 2, 5e-4 * time), (MIB, 1e-3 * time)])
        costs[name.replace("_", "-")] = cost
    return links_of(2, costs)


def test_measured_shared_memory_is_used():
    links = links_of(2, {**PCIE_NODE.whole.costs, "shared-memory": Cost(1e-6, 1e-12)})
    assert choose_all_reduce(MIB, links).algorithm == "shared-memory"


def test_a_measured_cost_replaces_the_derived_one():
    """An algorithm is not derived from others if there are no costs of its parts."""
    links = links_of(4, {**PCIE_NODE.whole.costs, "ring": Cost(0, 1e-13)})
    assert choose_all_reduce(MIB, links).algorithm == "ring"
    only = links_of(4, {"ring": Cost(0, 1e-9), "all-reduce": Cost(1e-3, 1e-10)})
    assert algorithm_seconds(MIB, only) == {"all-reduce": 1e-3 + 1e-10 * MIB, "ring": 1e-9 * MIB}


def test_a_small_difference_of_measured_times_is_noise():
    """The backend's all-reduce is used then. Data sheets have no noise."""
    for ring, expected in ((0.98, "all-reduce"), (0.9, "ring")):
        choice = choose_all_reduce(MIB, measured(all_reduce=1.0, ring=ring))
        assert choice.algorithm == expected
    described = {"all-reduce": Cost(1e-3, 1e-9), "ring": Cost(0.999e-3, 1e-9)}
    assert choose_all_reduce(MIB, links_of(2, described)).algorithm == "ring"


def test_buckets_use_the_backend_unless_it_is_much_slower():
    """Only the first phase of another algorithm overlaps with the backward."""
    for ring, in_buckets, alone in (
        (1.0, "all-reduce", "all-reduce"),
        (0.9, "all-reduce", "ring"),
        (0.8, "ring", "ring"),
    ):
        links = measured(all_reduce=1.0, ring=ring)
        assert choose_buckets(MIB, links, bucket_bytes=MIB).algorithm == in_buckets
        assert choose_all_reduce(MIB, links).algorithm == alone


def test_a_second_measurement_decides_between_close_algorithms():
    links = measured(all_reduce=1.0, ring=1.9, recursive_doubling=2.1)
    choice = choose_buckets(4 * MIB, links, bucket_bytes=MIB)
    assert choice.near == ("all-reduce", "ring")
    second = refined(choice, links, {"all-reduce": 3e-3, "ring": 2e-3})
    assert second.algorithm == "ring"
    assert second.bucket_bytes == MIB
    assert second.seconds == pytest.approx(8e-3)
    assert dict(second.others) == pytest.approx({"all-reduce": 12e-3, "recursive-doubling": 8.4e-3})
    # An algorithm that was not timed is not used, and the backend's call is close enough.
    slow = refined(choice, links, {"all-reduce": 9e-3, "ring": 8e-3})
    assert slow.algorithm == "all-reduce"


def test_the_size_of_a_bucket():
    """The best size is sqrt(a G / b) for G bytes in messages of x bytes that take a + b x seconds.

    It is rounded so that the number of buckets is a power of two.
    """
    for fixed, per_byte, total in (
        (1e-4, 1e-9, 100 * MIB),
        (1e-3, 1e-9, 100 * MIB),
        (1e-3, 1e-8, 1000 * MIB),
    ):
        group = links_of(2, {"all-reduce": Cost(fixed, per_byte)})
        best = (fixed * total / per_byte) ** 0.5
        assert best / 2**0.5 <= choose_buckets(total, group).bucket_bytes <= best * 2**0.5 + 1


def test_buckets_follow_the_links():
    local = choose_buckets(100 * MIB, PCIE_NODE)
    network = Link(1e-4, 8 * 45e9)
    links = describe("dp_replicate", machines=64, per_machine=8, inside=NVLINK, network=network)
    remote = choose_buckets(100 * MIB, links)
    assert local.bucket_bytes < remote.bucket_bytes
    assert f"in {100 * MIB // local.bucket_bytes} buckets of" in local.reason
    # No bucket is larger than all gradients.
    assert choose_buckets(100 * KIB, PCIE_NODE).bucket_bytes == 100 * KIB


def test_a_given_bucket_size_decides_the_algorithm():
    """Small messages use the algorithm with the fewest steps."""
    small = choose_buckets(25 * MIB, NVLINK_NODE, bucket_bytes=4 * KIB)
    assert small.algorithm == "recursive-doubling"
    single = choose_buckets(25 * MIB, NVLINK_NODE, bucket_bytes=100 * MIB)
    assert single.algorithm == "all-reduce"
    assert single.bucket_bytes == 25 * MIB
    assert single.seconds == algorithm_seconds(25 * MIB, NVLINK_NODE)["all-reduce"]


def test_small_messages_through_a_buffer_are_not_merged():
    """A switch that buffers 256 KiB makes single small messages fast, but not a series of them."""
    shaped = measured_cost([(16 * KIB, 1e-4), (256 * KIB, 1e-3), (MIB, 80e-3)])
    group = GroupLinks("dp_replicate", 2, 1, Level(2, {"all-reduce": shaped}))
    choice = choose_buckets(16 * MIB, group)
    assert choice.seconds == pytest.approx(shaped.seconds(16 * MIB))
    assert "2 ranks on 2 machines" in choice.reason


def test_the_document_has_the_current_table():
    """`python -m tools.choice_table --write` updates it."""
    text = DOCUMENT.read_text()
    assert written(text) == text


@pytest.mark.parametrize(
    ("group", "why"),
    [
        (TWO_NODES_ON_ETHERNET, "Only 1/8 of the bytes"),
        (NVLINK_NODE, "The backend's own all-reduce"),
    ],
)
def test_every_choice_has_a_reason(group, why):
    choice = choose_buckets(100 * MIB, group)
    assert choice.why.startswith(why)
    assert choice.reason.endswith(choice.why)
