"""Every all-reduce algorithm computes the sum, with the same bits on all ranks and in every run.

It sends the bytes of its formula.
"""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.distributed as dist

from plait.cluster.mesh import split_by_node
from plait.comm.all_reduce import Name, advance, launch, run, sum_over, wire_bytes
from tests.measured.traffic import count_traffic
from tests.parity.data_parallel import (
    as_two_machines,
    assert_same,
    reference,
    settings,
    train,
)
from tests.pool import WorkerFailed

NAMES: tuple[Name, ...] = get_args(Name)
FLAT = [name for name in NAMES if name != "hierarchical"]


def levels_of(ranks, per_node):
    return split_by_node([range(ranks)], [rank // per_node for rank in range(ranks)])


def integers(rank, numel):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-1000, 1000, (numel,), generator=generator).double()


def sums(rank, ranks, algorithm, per_node):
    """Check sums and bytes of integers, and return sums of other numbers. Runs on every rank."""
    levels = levels_of(ranks, per_node)
    results = []
    # Sizes below, at and beside a multiple of the number of ranks.
    for numel in (1, 12, 1000, 1001):
        tensor = integers(rank, numel)
        with count_traffic() as traffic:
            run(sum_over(tensor, dist.group.WORLD, algorithm=algorithm, levels=levels))
        assert torch.equal(tensor, sum(integers(other, numel) for other in range(ranks))), numel

        sent = sum(call.wire_bytes for call in traffic.calls)
        formula = sum(
            wire_bytes(algorithm, numel=numel, itemsize=8, ranks=ranks, per_node=per_node)
        )
        # With recursive doubling, a rank beyond the power of two sends its tensor once.
        fewest = numel * 8 if algorithm == "recursive-doubling" else formula
        # Chunks of a size that is no multiple of the ranks differ by one element.
        assert fewest - 8 <= sent <= formula + 8, (numel, sent, formula)
        if rank == 0:
            assert abs(sent - formula) <= 8, (numel, sent, formula)

        generator = torch.Generator().manual_seed(100 + rank)
        values = torch.randn(numel, generator=generator)
        run(sum_over(values, dist.group.WORLD, algorithm=algorithm, levels=levels))
        results.append(values.tolist())
    return results


@pytest.mark.parametrize(
    ("algorithm", "ranks", "per_node"),
    [*((name, ranks, ranks) for name in FLAT for ranks in (2, 3, 4)), ("hierarchical", 4, 2)],
)
def test_sum_bits_and_bytes(pool, algorithm, ranks, per_node):
    results = pool.run(ranks, sums, algorithm, per_node)
    results += pool.run(ranks, sums, algorithm, per_node)
    assert all(result == results[0] for result in results)


def together(rank, ranks):
    """Advance one sum of each algorithm at the same time. Runs on every rank."""
    levels = levels_of(ranks, 2)
    tensors = []
    steps = []
    for index, name in enumerate(NAMES):
        tensors.append(torch.full((50 + index,), float(rank + index)))
        steps.append(sum_over(tensors[index], dist.group.WORLD, algorithm=name, levels=levels))
    advance([launch(step) for step in steps])
    for index, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full((50 + index,), 6.0 + 4 * index)), NAMES[index]


def test_sums_of_several_algorithms_overlap(pool):
    pool.run(4, together)


def check_one_level(rank, ranks):
    """Runs on every rank."""
    for nodes in ([0, 0, 0], [0, 1, 2], [0, 0, 1], [0, 1, 0]):
        assert split_by_node([range(ranks)], nodes) is None


def test_unequal_machines_have_one_level(pool):
    pool.run(3, check_one_level)


@pytest.mark.parametrize("algorithm", FLAT)
def test_training_equals_one_process(pool, algorithm):
    config = settings(2, 0, 1, 3)
    # Buckets so small that several are in flight.
    config["parallel"] |= {"all_reduce": algorithm, "bucket_mib": 0.01}
    trace = pool.run(2, train, "plain", True, config)[0]
    assert_same(reference("plain", True, 6), trace)


def on_two_machines(rank, world, config):
    """Return the trace and the collectives of large tensors. Runs on every rank."""
    with as_two_machines(rank, world), count_traffic() as traffic:
        trace = train(rank, world, "plain", True, config)
    return trace, {(call.kind, call.ranks) for call in traffic.calls if call.full_bytes > 2000}


def test_two_machines_use_two_levels_without_measurement(pool):
    config = settings(4, 0, 1, 1)
    config["parallel"] |= {"transport": "torch", "measure_seconds": 0}
    results = pool.run(4, on_two_machines, config)
    for _, calls in results:
        assert {("all_to_all", 2), ("all_reduce", 2), ("all_gather", 2)} <= calls
    assert_same(reference("plain", True, 4), results[0][0])


def test_two_levels_on_one_machine_are_refused(pool):
    config = settings(2, 0, 1, 1)
    config["parallel"] |= {"all_reduce": "hierarchical"}
    message = "parallel.all_reduce = 'hierarchical': it requires several machines"
    with pytest.raises(WorkerFailed, match=message):
        pool.run(2, train, "plain", True, config)


def test_bytes_of_1000_float32_numbers():
    """Returns of `wire_bytes` are (inside of a machine, across machines)."""
    expected = {
        # On 2 machines of 8, a sum in two levels sends a sixteenth of a flat one's bytes across.
        ("ring", 16, 8): (0, 2 * 15 * 63 * 4),
        ("hierarchical", 16, 8): (2 * 7 * 125 * 4, 125 * 4),
        ("recursive-doubling", 4, 4): (8000, 0),
        ("recursive-doubling", 5, 5): (12000, 0),
    }
    actual = {
        (name, ranks, per_node): wire_bytes(
            name, numel=1000, itemsize=4, ranks=ranks, per_node=per_node
        )
        for name, ranks, per_node in expected
    }
    assert actual == expected


def create_twice(rank, ranks):
    """Create and destroy the groups of two machines twice. Runs on every rank."""
    for machine in (100, 200):
        levels = split_by_node([range(4)], [machine, machine, machine + 1, machine + 1])
        assert levels is not None
        for group in (levels.inside, levels.across):
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 2
            dist.destroy_process_group(group)


def test_groups_by_machine_are_created_again(pool):
    """A second engine must not get the destroyed groups of an engine that was closed."""
    pool.run(4, create_twice)
