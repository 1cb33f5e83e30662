"""Which way the chooser takes on clusters as they exist, and why. Their figures are in topologies.json, with their sources."""

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
def test_exact_ways(group, nbytes, expected):
    choice = choose_all_reduce(nbytes, group)
    assert choice.algorithm == expected, choice.reason
    assert choice.seconds == min(algorithm_seconds(nbytes, group).values())
    assert expected in choice.reason
    others = [seconds for _, seconds in choice.others]
    assert others == sorted(others)


def test_two_levels_halve_the_time_on_ethernet():
    """Between two machines, hierarchical sends S once, and a flat ring 15/8 S."""
    found = algorithm_seconds(100 * MIB, TWO_NODES_ON_ETHERNET)
    assert found["all-reduce"] / found["hierarchical"] == pytest.approx(15 / 8, rel=0.05)
    assert "1/8 of the bytes" in choose_all_reduce(100 * MIB, TWO_NODES_ON_ETHERNET).reason


def test_it_changes_when_the_links_change():
    network = Link(5e-6, 3e9)
    slower = describe("dp_replicate", machines=64, per_machine=8, inside=NVLINK, network=network)
    assert choose_all_reduce(16_000 * MIB, slower).algorithm == "hierarchical"
    assert choose_all_reduce(16_000 * MIB, SIXTY_FOUR_NODES).algorithm == "all-reduce"


def links_of(ranks, costs):
    return GroupLinks("dp_replicate", 1, ranks, Level(ranks, costs))


def test_shared_memory_where_it_was_measured():
    links = links_of(2, {**PCIE_NODE.whole.costs, "shared-memory": Cost(1e-6, 1e-12)})
    assert choose_all_reduce(MIB, links).algorithm == "shared-memory"


def test_what_was_measured_beats_what_it_is_made_of():
    links = links_of(4, {**PCIE_NODE.whole.costs, "ring": Cost(0, 1e-13)})
    assert choose_all_reduce(MIB, links).algorithm == "ring"
    only = links_of(4, {"ring": Cost(0, 1e-9), "all-reduce": Cost(1e-3, 1e-10)})
    assert algorithm_seconds(MIB, only) == {"all-reduce": 1e-3 + 1e-10 * MIB, "ring": 1e-9 * MIB}


def test_measured_times_that_hardly_differ_are_the_same():
    """The backend's all-reduce is taken then. A description has no noise."""
    for other, expected in ((0.98, "all-reduce"), (0.9, "ring")):
        costs = {
            way: measured_cost([(KIB, 1e-3 * x), (MIB, 1e-2 * x)])
            for way, x in (("all-reduce", 1.0), ("ring", other))
        }
        assert choose_all_reduce(MIB, links_of(2, costs)).algorithm == expected
    described = {way: Cost(1e-3 * x, 1e-9) for way, x in (("all-reduce", 1.0), ("ring", 0.999))}
    assert choose_all_reduce(MIB, links_of(2, described)).algorithm == "ring"


def measured(**milliseconds):
    """Links on which a MiB takes so long in each way, and half of it half as long."""
    costs = {
        way.replace("_", "-"): measured_cost([(MIB // 2, 5e-4 * x), (MIB, 1e-3 * x)])
        for way, x in milliseconds.items()
    }
    return links_of(2, costs)


def test_buckets_use_the_backend_unless_much_slower():
    """Only the first part of another algorithm overlaps with the backward. Alone, the faster one is taken."""
    for ring, in_buckets, alone in (
        (1.0, "all-reduce", "all-reduce"),
        (0.9, "all-reduce", "ring"),
        (0.8, "ring", "ring"),
    ):
        links = measured(all_reduce=1.0, ring=ring)
        assert choose_buckets(MIB, links, bucket_bytes=MIB).algorithm == in_buckets
        assert choose_all_reduce(MIB, links).algorithm == alone


def test_ways_that_come_near_are_settled_by_times_of_their_own():
    links = measured(all_reduce=1.0, ring=1.9, recursive_doubling=2.1)
    choice = choose_buckets(4 * MIB, links, bucket_bytes=MIB)
    assert choice.near == ("all-reduce", "ring")
    again = refined(choice, links, {"all-reduce": 3e-3, "ring": 2e-3})
    assert (again.algorithm, again.bucket_bytes) == ("ring", MIB)
    assert again.seconds == pytest.approx(8e-3)
    assert dict(again.others) == pytest.approx({"all-reduce": 12e-3, "recursive-doubling": 8.4e-3})
    # An algorithm that was not timed is not taken, and the backend's call is near enough.
    slow = refined(choice, links, {"all-reduce": 9e-3, "ring": 8e-3})
    assert slow.algorithm == "all-reduce"


def test_the_size_of_a_bucket():
    """It is sqrt(a G / b) for a message of a + b x seconds, rounded to the next power of two of buckets."""
    for fixed, per_byte, total in (
        (1e-4, 1e-9, 100 * MIB),
        (1e-3, 1e-9, 100 * MIB),
        (1e-3, 1e-8, 1000 * MIB),
    ):
        group = links_of(2, {"all-reduce": Cost(fixed, per_byte)})
        best = (fixed * total / per_byte) ** 0.5
        assert best / 2**0.5 <= choose_buckets(total, group).bucket_bytes <= best * 2**0.5 + 1


def test_buckets_follow_the_links():
    near = choose_buckets(100 * MIB, PCIE_NODE)
    network = Link(1e-4, 8 * 45e9)
    links = describe("dp_replicate", machines=64, per_machine=8, inside=NVLINK, network=network)
    far = choose_buckets(100 * MIB, links)
    assert near.bucket_bytes < far.bucket_bytes
    assert f"in {100 * MIB // near.bucket_bytes} buckets of" in near.reason
    # No bucket is larger than all gradients.
    assert choose_buckets(100 * KIB, PCIE_NODE).bucket_bytes == 100 * KIB


def test_a_given_bucket_decides_the_way():
    """Small messages use the algorithm with the fewest steps."""
    small = choose_buckets(25 * MIB, NVLINK_NODE, bucket_bytes=4 * KIB)
    assert small.algorithm == "recursive-doubling"
    whole = choose_buckets(25 * MIB, NVLINK_NODE, bucket_bytes=100 * MIB)
    assert (whole.algorithm, whole.bucket_bytes) == ("all-reduce", 25 * MIB)
    assert whole.seconds == algorithm_seconds(25 * MIB, NVLINK_NODE)["all-reduce"]


def test_small_messages_through_a_buffer_are_not_merged():
    """If a switch buffers 256 KiB, smaller messages are instant one by one, and not in a row."""
    shaped = measured_cost([(16 * KIB, 1e-4), (256 * KIB, 1e-3), (MIB, 80e-3)])
    group = GroupLinks("dp_replicate", 2, 1, Level(2, {"all-reduce": shaped}))
    choice = choose_buckets(16 * MIB, group)
    assert choice.seconds == pytest.approx(shaped.seconds(16 * MIB))
    assert "2 ranks on 2 machines" in choice.reason


def test_the_document_has_the_table_of_now():
    """`python -m tools.choice_table --write`."""
    text = DOCUMENT.read_text()
    assert written(text) == text


@pytest.mark.parametrize(
    ("group", "why"),
    [(TWO_NODES_ON_ETHERNET, "Only 1/8 of the bytes"), (NVLINK_NODE, "The backend's own all-reduce")],
)  # fmt: skip
def test_every_choice_says_why(group, why):
    choice = choose_buckets(100 * MIB, group)
    assert choice.why.startswith(why)
    assert choice.reason.endswith(choice.why)
