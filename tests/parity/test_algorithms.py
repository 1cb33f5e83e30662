"""Every way to sum over a group is the sum, has the same bits on all ranks and in every run, and sends the bytes of its formula."""

from __future__ import annotations

import os
from typing import get_args
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from plait.cluster.mesh import split_by_node
from plait.comm.all_reduce import Name, advance, launch, run, sum_over, wire_bytes
from tests.measured.traffic import count_traffic
from tests.parity.data_parallel import assert_same, reference, settings, train
from tests.pool import WorkerFailed

NAMES: tuple[Name, ...] = get_args(Name)


def levels_of(ranks, per_node):
    return split_by_node([range(ranks)], [rank // per_node for rank in range(ranks)])


def sums(rank, ranks, algorithm, per_node):
    """Whole numbers exactly; any numbers to the bit. Runs in a worker."""
    levels = levels_of(ranks, per_node)
    bits = []
    for numel in (1, 12, 1000, 1001):
        generator = torch.Generator().manual_seed(rank)
        whole = torch.randint(-1000, 1000, (numel,), generator=generator).double()
        everyone = [
            torch.randint(
                -1000, 1000, (numel,), generator=torch.Generator().manual_seed(r)
            ).double()
            for r in range(ranks)
        ]
        with count_traffic() as traffic:
            run(sum_over(whole, dist.group.WORLD, algorithm=algorithm, levels=levels))
        assert torch.equal(whole, sum(everyone[1:], everyone[0])), numel
        # The counter takes what is as small as a norm for a norm, and kinds apart; here all of it is the sum's.
        sent, formula = (
            sum(call.wire_bytes for call in traffic.calls),
            wire_bytes(algorithm, numel=numel, itemsize=8, ranks=ranks, per_node=per_node),
        )
        fewest = (
            sum(formula) if algorithm != "recursive-doubling" else numel * 8
        )  # a rank beyond the power of two sends once
        assert fewest - 8 <= sent <= sum(formula) + 8, (numel, sent, formula)
        if rank == 0:
            assert abs(sent - sum(formula)) <= 8, (numel, sent, formula)
        x = torch.randn(numel, generator=generator)
        run(sum_over(x, dist.group.WORLD, algorithm=algorithm, levels=levels))
        bits.append(x.tolist())
    return bits


CASES = [
    (name, ranks, ranks) for name in NAMES if name != "hierarchical" for ranks in (2, 3, 4)
] + [("hierarchical", 4, 2)]


@pytest.mark.parametrize(("algorithm", "ranks", "per_node"), CASES)
def test_sum_bits_and_bytes(pool, algorithm, ranks, per_node):
    first, second = (
        pool.run(ranks, sums, algorithm, per_node),
        pool.run(ranks, sums, algorithm, per_node),
    )
    assert all(bits == first[0] for bits in first + second)


def together(rank, ranks):
    """Several at once, each in its own way. Runs in a worker."""
    levels = levels_of(ranks, 2)
    tensors = [torch.full((50 + index,), float(rank + index)) for index in range(len(NAMES))]
    running = [
        sum_over(t, dist.group.WORLD, algorithm=name, levels=levels)
        for t, name in zip(tensors, NAMES, strict=True)
    ]
    advance([launch(steps) for steps in running])
    for index, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((50 + index,), 6.0 + 4 * index)), NAMES[index]


def test_several_at_once(pool):
    pool.run(4, together)


def uneven(rank, ranks):
    """Runs in a worker."""
    assert split_by_node([range(ranks)], [0] * ranks) is None
    assert split_by_node([range(ranks)], list(range(ranks))) is None
    assert split_by_node([range(ranks)], [0, 0, 1]) is None
    assert split_by_node([range(ranks)], [0, 1, 0]) is None


def test_one_level_where_machines_are_not_alike(pool):
    pool.run(3, uneven)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "algorithm", ["all-reduce", "reduce-scatter+all-gather", "ring", "recursive-doubling"]
)
def test_training_equals_one_process(pool, algorithm, world):
    """Stage 0 with several buckets in flight, float64."""
    config = settings(world, 0, 1, 3)
    config["parallel"] |= {"all_reduce": algorithm, "bucket_mib": 0.01}
    found = pool.run(world, train, "plain", True, config)[0]
    assert_same(reference("plain", True, world * 3), found)


def on_two_machines(rank, world, config):
    """As if ranks 0 and 1 were on one machine and 2 and 3 on another. Runs in a worker."""
    place = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank % 2,
        "LOCAL_WORLD_SIZE": 2,
        "GROUP_RANK": rank // 2,
    }
    with (
        patch.dict(os.environ, {name: str(value) for name, value in place.items()}),
        count_traffic() as traffic,
    ):
        trace = train(rank, world, "plain", True, config)
    return trace, {(call.kind, call.ranks) for call in traffic.calls if call.full_bytes > 2000}


def test_two_levels_by_themselves_on_two_machines(pool):
    """Where nothing is measured."""
    config = settings(4, 0, 1, 1)
    config["parallel"] |= {"transport": "torch", "measure_seconds": 0}
    results = pool.run(4, on_two_machines, config)
    assert all(
        {("all_to_all", 2), ("all_reduce", 2), ("all_gather", 2)} <= calls for _, calls in results
    )
    trace = results[0][0]
    assert trace is not None
    assert_same(reference("plain", True, 4), trace)


def test_two_levels_of_one_machine_are_refused(pool):
    config = settings(2, 0, 1, 1)
    config["parallel"] |= {"all_reduce": "hierarchical"}
    with pytest.raises(
        WorkerFailed,
        match="parallel.all_reduce = 'hierarchical': it requires several machines",
    ):
        pool.run(2, train, "plain", True, config)


def test_formulas():
    """Of 1,000 float32 numbers on 2 machines of 8: across goes a sixteenth of what a flat sum sends."""
    flat = wire_bytes("ring", numel=1000, itemsize=4, ranks=16, per_node=8)
    assert flat == (0, 2 * 15 * 63 * 4)
    assert wire_bytes("hierarchical", numel=1000, itemsize=4, ranks=16, per_node=8) == (
        2 * 7 * 125 * 4,
        125 * 4,
    )
    assert wire_bytes("recursive-doubling", numel=1000, itemsize=4, ranks=4, per_node=4) == (
        8000,
        0,
    )
    assert wire_bytes("recursive-doubling", numel=1000, itemsize=4, ranks=5, per_node=5) == (
        12000,
        0,
    )


def create_twice(rank, ranks):
    """Runs in a worker."""
    for machine in (100, 200):
        levels = split_by_node([range(4)], [machine, machine, machine + 1, machine + 1])
        assert levels is not None
        for group in (levels.inside, levels.across):
            ones = torch.ones(1)
            dist.all_reduce(ones, group=group)
            assert ones.item() == 2
            dist.destroy_process_group(group)


def test_groups_by_machine_are_created_again(pool):
    """A second engine on several machines has the groups of one that was closed."""
    pool.run(4, create_twice)
