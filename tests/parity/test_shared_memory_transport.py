"""Collectives in shared memory equal torch's, with the same bits on every rank and in every run.

They are tested through reuse, growth and overlap of memory, and in trainings.
"""

from __future__ import annotations

import random
import time
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from plait.comm.all_reduce import Flat
from plait.comm.collectives import AllToAllReduceScatter
from plait.comm.shared_memory import collectives
from plait.comm.shared_memory import host as host_module
from plait.comm.transport import connect
from plait.errors import CommunicationError, ConfigError
from tests.covers import cover
from tests.measured.traffic import count_traffic
from tests.parity import cases
from tests.parity.data_parallel import assert_same, reference, settings, train

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def shared_transport(group=None):
    transport = connect(group or dist.group.WORLD, label="the test", device=CPU)
    assert transport.name == "shared-memory", transport.reason
    return transport


def flat(numel, dtype=torch.float32):
    return Flat(dtype, ((numel,),))


def inputs_of_ranks(seed, ranks, numel, dtype=torch.float32, *, integers=True):
    """Inputs of all ranks. Sums of small integers are exact in every dtype. [ranks, numel]"""
    generator = torch.Generator().manual_seed(seed)
    if integers:
        return torch.randint(-8, 9, (ranks, numel), generator=generator).to(dtype)
    return torch.randn(ranks, numel, generator=generator, dtype=torch.float64).to(dtype)


def all_gather(transport, shard, ranks, *, allocates=True):
    """Gather into memory of the transport, as `fully_shard` does, or into the caller's."""
    numel = ranks * shard.numel()
    if allocates:
        output = transport.all_gather.allocate((numel,), dtype=shard.dtype, device=CPU)
        rank = dist.get_rank() % ranks
        place = output.narrow(0, rank * shard.numel(), shard.numel())
        shard = place.copy_(shard)
    else:
        output = torch.full((numel,), 99, dtype=shard.dtype)
    transport.all_gather(output, shard, dist.group.WORLD)
    return output


def reduce_scatter(transport, inputs, ranks, *, allocates=True, op=dist.ReduceOp.SUM):
    """Reduce in memory of the transport, as `fully_shard` does, or in the caller's."""
    shape = (inputs.numel() // ranks,)
    if allocates:
        inputs = allocated(transport, inputs)
        output = transport.reduce_scatter.allocate(shape, dtype=inputs.dtype, device=CPU)
    else:
        output = torch.empty(shape, dtype=inputs.dtype)
    transport.reduce_scatter(output, inputs, dist.group.WORLD, op)
    return output


def allocated(transport, inputs):
    """Copy inputs of a reduce-scatter into memory of the transport."""
    allocate = transport.reduce_scatter.allocate
    return allocate((inputs.numel(),), dtype=inputs.dtype, device=CPU).copy_(inputs)


def check_all_gather(transport, inputs, *, allocates=True):
    """Gather the rows of all ranks, and return the output."""
    ranks = len(inputs)
    output = all_gather(transport, inputs[dist.get_rank()], ranks, allocates=allocates)
    assert torch.equal(output, inputs.flatten()), (inputs.shape, inputs.dtype, allocates)
    return output


def check_reduce_scatter(transport, inputs, *, allocates=True):
    """Sum over the rows of all ranks, of which every rank receives its part."""
    ranks = len(inputs)
    rank = dist.get_rank()
    output = reduce_scatter(transport, inputs[rank], ranks, allocates=allocates)
    expected = inputs.sum(0, dtype=inputs.dtype).view(ranks, -1)[rank]
    assert torch.equal(output, expected), (inputs.shape, inputs.dtype, allocates)


def compare_with_torch(rank, ranks):
    """Use all dtypes, and sizes that grow and shrink. Runs on every rank."""
    transport = shared_transport()
    for seed, numel in enumerate((1, 300_001, 5, 0, 64, 70_000)):
        for dtype, allocates in product(DTYPES, (True, False)):
            check_all_gather(
                transport, inputs_of_ranks(seed, ranks, numel, dtype), allocates=allocates
            )
            check_reduce_scatter(
                transport, inputs_of_ranks(seed, ranks, ranks * numel, dtype), allocates=allocates
            )
    inputs = torch.full((ranks * 3,), float(rank))
    mean = reduce_scatter(transport, inputs, ranks, op=dist.ReduceOp.AVG)
    assert torch.equal(mean, torch.full((3,), sum(range(ranks)) / ranks))
    with pytest.raises(NotImplementedError, match="MAX"):
        reduce_scatter(transport, inputs, ranks, allocates=False, op=dist.ReduceOp.MAX)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_equals_torch(pool, ranks):
    pool.run(ranks, compare_with_torch)


def reduce_buckets(rank, ranks):
    """Reduce several buckets at a time, in random orders that all ranks share.

    Returns the bits of sums that are not exact. Runs on every rank.
    """
    transport = shared_transport()
    sizes = [
        (100_003, torch.float32),
        (1, torch.float32),
        (4096, torch.bfloat16),
        (7, torch.float64),
        (0, torch.float32),
    ]
    buckets = transport.buckets([flat(numel, dtype) for numel, dtype in sizes])
    draws = random.Random(4)
    for step in range(20):
        if draws.random() < 0.3:
            # Higher ranks come later.
            sum(number * number for number in range(20_000 * rank))
        inputs = []
        for index, (numel, dtype) in enumerate(sizes):
            inputs.append(inputs_of_ranks(step * 100 + index, ranks, numel, dtype))
        started = draws.sample(range(len(sizes)), len(sizes))
        for index in started:
            buckets.buffers[index].copy_(inputs[index][rank])
            buckets.start(index)
        for index in draws.sample(started, len(started)):
            buckets.finish(index)
            expected = inputs[index].sum(0)
            assert torch.equal(buckets.buffers[index], expected), (step, index)

    bits = []
    for index, (numel, dtype) in enumerate(sizes):
        inputs = inputs_of_ranks(index, ranks, numel, dtype, integers=False)
        buckets.buffers[index].copy_(inputs[rank])
        buckets.start(index)
        buckets.finish(index)
        bits.append(bytes(buckets.buffers[index].view(torch.uint8).tolist()[:4000]))
    return bits


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_buckets_equal_torch_and_have_the_same_bits(pool, ranks):
    first_run = pool.run(ranks, reduce_buckets)
    second_run = pool.run(ranks, reduce_buckets)
    assert all(bits == first_run[0] for bits in first_run + second_run)


def sum_bfloat16(rank, ranks):
    """Runs on every rank."""
    inputs = inputs_of_ranks(0, ranks, ranks * 999, torch.bfloat16, integers=False)
    total = inputs[0].float()
    for row in inputs[1:]:
        total += row.float()
    expected = total.bfloat16().view(ranks, -1)[rank]
    assert torch.equal(reduce_scatter(shared_transport(), inputs[rank], ranks), expected)


def test_bfloat16_is_summed_in_float32(pool):
    """The sum is rounded once, and not once per rank."""
    pool.run(4, sum_bfloat16)


def keep_outputs(rank, ranks):
    """Keep outputs for random times, and check that they are not written to.

    Runs on every rank.
    """
    transport = shared_transport()
    draws = random.Random(1)
    outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    with count_traffic() as traffic:
        for step in range(120):
            numel = draws.choice((8, 500, 20_000))
            inputs = inputs_of_ranks(step, ranks, numel, integers=False)
            output = check_all_gather(transport, inputs, allocates=draws.random() < 0.8)
            outputs.append((output, output.clone()))
            if draws.random() < 0.5:
                check_reduce_scatter(transport, inputs_of_ranks(step, ranks, numel * ranks))
            for tensor, copy in outputs:
                assert torch.equal(tensor, copy), "written to while it was in use"
            while len(outputs) > draws.choice((0, 1, 2, 3, 4)):
                outputs.pop(draws.randrange(len(outputs)))
    assert sum(call.kind == "all_gather" for call in traffic.calls) >= 120


@pytest.mark.parametrize("ranks", [2, 3])
def test_memory_in_use_is_not_reused(pool, ranks):
    pool.run(ranks, keep_outputs)


def read_slowly(rank, ranks):
    """Rank 0 keeps one of two slots, and rank 1 is slow to read the other. Runs on every rank."""
    transport = shared_transport()
    add_in_order = collectives.add_in_order

    def add_late(shards, outputs):
        time.sleep(0.05)
        add_in_order(shards, outputs)

    first = None
    with patch.object(collectives, "add_in_order", add_late if rank == 1 else add_in_order):
        for step in range(4):
            inputs = allocated(transport, torch.full((2000,), float(step)))
            output = transport.reduce_scatter.allocate((1000,), dtype=torch.float32, device=CPU)
            transport.reduce_scatter(output, inputs, dist.group.WORLD, dist.ReduceOp.SUM)
            assert torch.equal(output, torch.full((1000,), 2.0 * step)), step
            if step == 0 and rank == 0:
                first = inputs
    assert first is None or not first.any()


def test_a_slot_is_not_written_to_while_another_rank_reads_it(pool):
    pool.run(2, read_slowly)


def keep_all_slots(rank, ranks):
    """Rank 1 keeps all memory, after which all ranks use torch. Runs on every rank."""
    transport = shared_transport()
    tensors = []
    for step in range(10):
        output = check_all_gather(transport, inputs_of_ranks(step, ranks, 100))
        inputs = inputs_of_ranks(step, ranks, 100 * ranks)
        own_inputs = allocated(transport, inputs[rank])
        result = transport.reduce_scatter.allocate((100,), dtype=torch.float32, device=CPU)
        transport.reduce_scatter(result, own_inputs, dist.group.WORLD, dist.ReduceOp.SUM)
        assert torch.equal(result, inputs.sum(0).view(ranks, -1)[rank])
        if rank == 1:
            tensors.append((output, own_inputs))
    tensors.clear()
    with count_traffic() as traffic:
        for _ in range(2):
            all_gather(transport, torch.ones(100), ranks)
    assert [call.kind for call in traffic.calls] == ["all_gather", "all_gather"]


def test_a_rank_that_keeps_all_memory(pool):
    pool.run(3, keep_all_slots)


def use_two_groups(rank, ranks):
    """Use a group of all ranks and groups of two, also interleaved. Runs on every rank."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = rank // 2
    transport_of_half = shared_transport(halves[half])
    buckets = shared_transport().buckets([flat(1000)])
    buckets_of_half = transport_of_half.buckets([flat(500)])
    sum_of_half = 1.0 + 4 * half
    for step in range(5):
        buckets.buffers[0].fill_(step + rank)
        buckets_of_half.buffers[0].fill_(rank)
        buckets.start(0)
        buckets_of_half.start(0)
        output = reduce_scatter(transport_of_half, torch.full((4,), float(rank)), 2)
        assert torch.equal(output, torch.full((2,), sum_of_half))
        buckets_of_half.finish(0)
        buckets.finish(0)
        assert torch.equal(buckets.buffers[0], torch.full((1000,), 4.0 * step + 6))
        assert torch.equal(buckets_of_half.buffers[0], torch.full((500,), sum_of_half))
    dist.barrier()
    dist.destroy_process_group(halves[half])


def test_groups_do_not_disturb_each_other(pool):
    pool.run(4, use_two_groups)


def connect_different_machines(rank, ranks):
    """Connect when rank 1 cannot use shared memory, for two reasons. Runs on every rank."""
    reasons = []
    hindrances: list[tuple[str, Any]] = [
        ("_open", lambda offer, total: (None, "another machine")),
        ("_unsupported_platform", lambda: "another processor"),
    ]
    for name, replacement in hindrances:
        # Two machines cannot be had here.
        original = getattr(host_module, name)
        with patch.object(host_module, name, replacement if rank == 1 else original):
            transport = connect(dist.group.WORLD, label="the test", device=CPU)
            message = r"parallel.transport = 'shared-memory': rank 1: another"
            with pytest.raises(ConfigError, match=message):
                connect(dist.group.WORLD, label="the test", device=CPU, requested="shared-memory")
        assert transport.name == "torch"
        assert isinstance(transport.reduce_scatter, AllToAllReduceScatter)
        assert transport.all_gather is None
        reasons.append(transport.reason)
    transport = connect(dist.group.WORLD, label="the test", device=CPU, requested="torch")
    assert transport.reason == "set in the configuration"
    return reasons


def test_a_reason_of_one_rank_decides_for_all(pool):
    for reasons in pool.run(3, connect_different_machines):
        assert reasons == ["rank 1: another machine", "rank 1: another processor"]


def connect_to_foreign_memory(rank, ranks):
    """Find other memory at the path on rank 1: the nonce differs. Runs on every rank."""
    original = host_module._open

    def open_another(offer, total):
        return original((offer[0], b"x" * 32), total)

    with patch.object(host_module, "_open", open_another if rank == 1 else original):
        transport = connect(dist.group.WORLD, label="the test", device=CPU)
    assert transport.name == "torch"
    assert "memory is not the first rank's" in transport.reason


def test_the_same_path_on_another_machine_is_noticed(pool):
    pool.run(2, connect_to_foreign_memory)


def communicate_short_of_memory(rank, ranks):
    """Share small collectives, and use torch for large ones. Runs on every rank."""
    with patch.object(host_module, "free_host_bytes", lambda: 2_000_000):
        transport = shared_transport()
        with count_traffic() as traffic:
            for numel in (100, 1_000_000, 200, 1_000_000):
                check_all_gather(transport, inputs_of_ranks(0, ranks, numel))
                check_reduce_scatter(transport, inputs_of_ranks(0, ranks, numel * ranks))
            buckets = transport.buckets([flat(1_000_000)])
            buckets.buffers[0].fill_(rank)
            buckets.start(0)
            buckets.finish(0)
            expected = torch.full((1_000_000,), float(sum(range(ranks))))
            assert torch.equal(buckets.buffers[0], expected)
        # Torch's reduce-scatter on the CPU is an all-to-all and a sum.
        assert "all_to_all" in {call.kind for call in traffic.calls}
        required = connect(
            dist.group.WORLD, label="the test", device=CPU, requested="shared-memory"
        )
        with pytest.raises(ConfigError, match="to share, and"):
            required.buckets([flat(1_000_000)])


def test_short_of_memory(pool):
    pool.run(2, communicate_short_of_memory)


def issue_different_sizes(rank, ranks):
    """Runs on every rank."""
    transport = shared_transport()
    all_gather(transport, torch.ones(100), ranks)
    message = (
        r"all-gather over the test: "
        r"rank \d gathers \d+ bytes and rank \d \d+, so the ranks issue"
    )
    with pytest.raises(CommunicationError, match=message):
        all_gather(transport, torch.ones(10 + rank), ranks)
    reduce_scatter(transport, torch.ones(100 * ranks), ranks)
    with pytest.raises(CommunicationError, match="reduce-scatter over the test: rank . reduces"):
        reduce_scatter(transport, torch.ones((10 + rank) * ranks), ranks)


def test_different_sizes_are_an_error(pool):
    pool.run(2, issue_different_sizes)


LAYOUTS = [
    (2, 0, 1),
    (2, 1, 1),
    (2, 2, 1),
    (2, 3, 1),
    (3, 2, 1),
    (4, 0, 1),
    (4, 3, 1),
    (4, 1, 2),
    (4, 3, 2),
]
"""Ranks, ZeRO stage, replicas. Three ranks have shards of different sizes."""


def layout_features(world, stage, replicas, accumulation):
    return world, (stage, replicas), accumulation


@pytest.mark.parametrize(
    ("world", "stage", "replicas", "accumulation"),
    cover(
        [(*layout, accumulation) for layout in LAYOUTS for accumulation in (1, 3)],
        features=layout_features,
        cost=lambda world, *_: world,
    ),
)
def test_training_equals_one_process(pool, world, stage, replicas, accumulation):
    config = settings(world, stage, replicas, accumulation)
    config["parallel"]["transport"] = "shared-memory"
    trace = pool.run(world, train, "plain", True, config)[0]
    assert_same(reference("plain", True, world * accumulation), trace)


def losses_and_bytes(rank, world, config):
    """Return the losses of three steps, and the bytes of the last one. Runs on every rank."""
    engine = cases.engine(cases.build("llama", tied=False, dtype=torch.float32), config)
    losses = []
    for step in cases.steps_for("llama", world, steps=3):
        with count_traffic() as traffic:
            losses.append(float(engine.train_batch(step[rank])))
    sent = traffic.bytes()
    sent.pop("control", None)
    assert sent
    return losses, sent


# There are two ranks in the following tests, because the sum of two numbers does not depend on
# their order: losses are the same to the bit.


@pytest.mark.parametrize(
    ("stage", "wire"), cover(product((0, 1, 2, 3), ("fp32", "bf16")), strength=1)
)
def test_bf16_has_the_same_losses_and_bytes_as_torch(pool, stage, wire):
    config = settings(2, stage, 1, 1, bf16={"enabled": True}, communication_data_type=wire)
    config["parallel"]["transport"] = "torch"
    expected = pool.run(2, losses_and_bytes, config)
    # In bf16, stage 0 is one unit of `fully_shard` per replica, whose all-reduce is torch's.
    config["parallel"]["transport"] = "shared-memory" if stage else "auto"
    assert pool.run(2, losses_and_bytes, config) == expected


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_float32_has_the_same_losses_and_bytes_as_torch(pool, stage):
    config = settings(2, stage, 1, 1)
    # A measurement might choose an all-reduce of messages, which are counted as messages.
    config["parallel"]["measure_seconds"] = 0
    config["parallel"]["transport"] = "torch"
    expected = pool.run(2, losses_and_bytes, config)
    config["parallel"]["transport"] = "shared-memory"
    assert pool.run(2, losses_and_bytes, config) == expected
