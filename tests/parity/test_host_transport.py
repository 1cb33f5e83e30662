"""Shared memory between ranks: equal to torch's collectives, the same bits on every rank and in every run, through reuse, growth and
overlap, and whole trainings through it against one process."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import plait
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


def shared(group=None):
    found = connect(group or dist.group.WORLD, label="the test", device=CPU)
    assert found.name == "shared-memory", found.reason
    return found


def flat(numel, dtype=torch.float32):
    return Flat(dtype, ((numel,),))


def numbers(seed, numel, dtype, *, whole):
    """Small whole numbers, of which every sum is exact, or any."""
    generator = torch.Generator().manual_seed(seed)
    if whole or not dtype.is_floating_point:
        return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def gather(way, shard, ranks, *, ask):
    """As `fully_shard` does it (`ask`), or with memory of one's own."""
    assert way.all_gather is not None
    rank = dist.get_rank(dist.group.WORLD) % ranks
    if not ask:
        output = torch.full((ranks * shard.numel(),), 99, dtype=shard.dtype)
        way.all_gather(output, shard, dist.group.WORLD)
        return output
    output = way.all_gather.allocate((ranks * shard.numel(),), dtype=shard.dtype, device=CPU)
    mine = output.narrow(0, rank * shard.numel(), shard.numel())
    mine.copy_(shard)
    way.all_gather(output, mine, dist.group.WORLD)
    return output


def scatter(way, stacked, ranks, *, ask, op=dist.ReduceOp.SUM):
    assert way.reduce_scatter is not None
    given = (
        way.reduce_scatter.allocate((stacked.numel(),), dtype=stacked.dtype, device=CPU).copy_(
            stacked
        )
        if ask
        else stacked
    )
    if ask:
        output = way.reduce_scatter.allocate(
            (stacked.numel() // ranks,), dtype=stacked.dtype, device=CPU
        )
    else:
        output = torch.empty(stacked.numel() // ranks, dtype=stacked.dtype)
    way.reduce_scatter(output, given, dist.group.WORLD, op)
    return output


def against_torch(rank, ranks):
    """Exact sums, all dtypes, sizes up and down, in both forms. Runs in a worker."""
    way = shared()
    for number, numel in enumerate((1, 300_001, 5, 0, 64, 70_000)):
        for dtype in DTYPES:
            for ask in (True, False):
                shard = numbers(10 * number + rank, numel, dtype, whole=True)
                everyone = [
                    numbers(10 * number + r, numel, dtype, whole=True) for r in range(ranks)
                ]
                assert torch.equal(gather(way, shard, ranks, ask=ask), torch.cat(everyone)), (
                    numel,
                    dtype,
                    ask,
                )
                inputs = [
                    numbers(77 * number + r, ranks * numel, dtype, whole=True) for r in range(ranks)
                ]
                total = sum(inputs[1:], inputs[0])[rank * numel : (rank + 1) * numel]
                assert torch.equal(scatter(way, inputs[rank], ranks, ask=ask), total), (
                    numel,
                    dtype,
                    ask,
                )
    mean = scatter(
        way, torch.full((ranks * 3,), float(rank)), ranks, ask=True, op=dist.ReduceOp.AVG
    )
    assert torch.equal(mean, torch.full((3,), sum(range(ranks)) / ranks))
    with pytest.raises(NotImplementedError, match="MAX"):
        scatter(way, torch.ones(ranks), ranks, ask=False, op=dist.ReduceOp.MAX)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_equals_torch(pool, ranks):
    pool.run(ranks, against_torch)


def sums_of_buckets(rank, ranks):
    """Several in flight over several steps, started and finished in any order that all share. Runs in a worker."""
    way = shared()
    sizes = [
        (100_003, torch.float32),
        (1, torch.float32),
        (4096, torch.bfloat16),
        (7, torch.float64),
        (0, torch.float32),
    ]
    buckets = way.buckets([flat(numel, dtype) for numel, dtype in sizes])
    order = random.Random(4)
    bits = []
    for step in range(20):
        if order.random() < 0.3:  # ranks come apart
            sum(i * i for i in range(20_000 * rank))
        starts = order.sample(range(len(sizes)), len(sizes))
        for index in starts:
            buckets.buffers[index].copy_(
                numbers(step * 100 + index * 10 + rank, *sizes[index], whole=True)
            )
            buckets.start(index)
        for index in order.sample(starts, len(starts)):
            buckets.finish(index)
            inputs = [
                numbers(step * 100 + index * 10 + r, *sizes[index], whole=True)
                for r in range(ranks)
            ]
            assert torch.equal(buckets.buffers[index], sum(inputs[1:], inputs[0])), (step, index)
    for index, (numel, dtype) in enumerate(sizes):
        buckets.buffers[index].copy_(numbers(index * 10 + rank, numel, dtype, whole=False))
        buckets.start(index)
        buckets.finish(index)
        bits.append(bytes(buckets.buffers[index].view(torch.uint8).tolist()[:4000]))
    return bits


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_buckets_equal_torch_and_have_the_same_bits_everywhere(pool, ranks):
    first, second = pool.run(ranks, sums_of_buckets), pool.run(ranks, sums_of_buckets)
    assert all(bits == first[0] for bits in first + second)


def half_sums(rank, ranks):
    """Rounded once, not once a rank. Runs in a worker."""
    way = shared()
    inputs = [numbers(r, ranks * 999, torch.bfloat16, whole=False) for r in range(ranks)]
    exact = sum((x.float() for x in inputs[1:]), inputs[0].float()).to(torch.bfloat16)
    assert torch.equal(
        scatter(way, inputs[rank], ranks, ask=True), exact[rank * 999 : (rank + 1) * 999]
    )


def test_half_precision_is_summed_in_float32(pool):
    pool.run(4, half_sums)


def held(rank, ranks):
    """Outputs and inputs that are kept are never written to again, whatever is kept for how long. Runs in a worker."""
    way = shared()
    order = random.Random(1)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    with count_traffic() as traffic:
        for step in range(120):
            numel = order.choice((8, 500, 20_000))
            shard = numbers(step * 10 + rank, numel, torch.float32, whole=False)
            output = gather(way, shard, ranks, ask=order.random() < 0.8)
            kept.append((output, output.clone()))
            expected = torch.cat(
                [numbers(step * 10 + r, numel, torch.float32, whole=False) for r in range(ranks)]
            )
            assert torch.equal(output, expected), step
            if order.random() < 0.5:
                inputs = [
                    numbers(step * 10 + r, numel * ranks, torch.float32, whole=True)
                    for r in range(ranks)
                ]
                part = scatter(way, inputs[rank], ranks, ask=True)
                assert torch.equal(
                    part, sum(inputs[1:], inputs[0])[rank * numel : (rank + 1) * numel]
                ), step
            for tensor, copy in kept:
                assert torch.equal(tensor, copy), "written to while it was in use"
            while len(kept) > order.choice((0, 1, 2, 3, 4)):
                kept.pop(order.randrange(len(kept)))
    assert sum(call.kind == "all_gather" for call in traffic.calls) >= 120


@pytest.mark.parametrize("ranks", [2, 3])
def test_memory_in_use_is_not_reused(pool, ranks):
    pool.run(ranks, held)


def slow_reader(rank, ranks):
    """Rank 0 has one slot left, because it keeps the other, and rank 1 is slow to read it. Runs in a worker."""
    way = shared()
    assert way.reduce_scatter is not None
    real = collectives.add_in_order

    def late(pieces, outputs):
        time.sleep(0.05)
        real(pieces, outputs)

    kept = None
    with patch.object(collectives, "add_in_order", late if rank == 1 else real):
        for step in range(4):
            given = way.reduce_scatter.allocate((2000,), dtype=torch.float32, device=CPU).fill_(
                step
            )
            output = way.reduce_scatter.allocate((1000,), dtype=torch.float32, device=CPU)
            way.reduce_scatter(output, given, dist.group.WORLD, dist.ReduceOp.SUM)
            assert torch.equal(output, torch.full((1000,), 2.0 * step)), step
            kept = given if kept is None and rank == 0 else kept
    assert kept is None or bool((kept == 0).all())


def test_a_slot_is_not_written_to_while_another_rank_reads_it(pool):
    pool.run(2, slow_reader)


def keeps_what_others_free(rank, ranks):
    """One rank keeps everything, so that no slot is free any more: torch's collective takes over, on all. Runs in a worker."""
    way = shared()
    kept = []
    for step in range(10):
        shard = numbers(step * 10 + rank, 100, torch.float32, whole=True)
        output = gather(way, shard, ranks, ask=True)
        assert torch.equal(
            output,
            torch.cat(
                [numbers(step * 10 + r, 100, torch.float32, whole=True) for r in range(ranks)]
            ),
        )
        inputs = [
            numbers(step * 10 + r, 100 * ranks, torch.float32, whole=True) for r in range(ranks)
        ]
        assert way.reduce_scatter is not None
        given = way.reduce_scatter.allocate((100 * ranks,), dtype=torch.float32, device=CPU).copy_(
            inputs[rank]
        )
        result = way.reduce_scatter.allocate((100,), dtype=torch.float32, device=CPU)
        way.reduce_scatter(result, given, dist.group.WORLD, dist.ReduceOp.SUM)
        assert torch.equal(result, sum(inputs[1:], inputs[0])[rank * 100 : (rank + 1) * 100])
        if rank == 1:
            kept.append((output, given))
    kept.clear()
    with count_traffic() as traffic:
        for _ in range(2):
            gather(way, torch.ones(100), ranks, ask=True)
    assert [call.kind for call in traffic.calls] == ["all_gather", "all_gather"]


def test_a_rank_that_keeps_everything(pool):
    pool.run(3, keeps_what_others_free)


def pairs(rank, ranks):
    """Two groups of two beside the group of all, one at a time and interleaved. Runs in a worker."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank // 2]
    everyone, half = shared(), shared(mine)
    whole_buckets, half_buckets = everyone.buckets([flat(1000)]), half.buckets([flat(500)])
    for step in range(5):
        whole_buckets.buffers[0].fill_(step + rank)
        half_buckets.buffers[0].fill_(rank)
        whole_buckets.start(0)
        half_buckets.start(0)
        assert torch.equal(
            scatter(half, torch.full((4,), float(rank)), 2, ask=True),
            torch.full((2,), 1.0 + 4 * (rank // 2)),
        )
        half_buckets.finish(0)
        whole_buckets.finish(0)
        assert torch.equal(whole_buckets.buffers[0], torch.full((1000,), 4.0 * step + 6))
        assert torch.equal(half_buckets.buffers[0], torch.full((500,), 1.0 + 4 * (rank // 2)))
    dist.barrier()
    for group in halves:
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)


def test_groups_do_not_disturb_each_other(pool):
    pool.run(4, pairs)


@contextmanager
def on_one_rank(rank, target, value):
    """Rank 1's machine is different."""
    if rank != 1:
        yield
        return
    with patch.object(host_module, target, value):
        yield


def not_here(rank, ranks):
    """A reason that only one rank has decides for all. Runs in a worker."""
    reasons = []
    group = dist.group.WORLD
    hindrances: list[tuple[str, Any]] = [
        ("_open", lambda offer, total: (None, "another machine")),
        ("_unsupported_platform", lambda: "another processor"),
    ]
    for target, value in hindrances:
        with on_one_rank(rank, target, value):
            found = connect(group, label="the test", device=CPU)
            assert found.name == "torch"
            assert isinstance(found.reduce_scatter, AllToAllReduceScatter)
            assert found.all_gather is None
            reasons.append(found.reason)
            with pytest.raises(
                ConfigError, match=r"parallel.transport = 'shared-memory': rank 1: another"
            ):
                connect(group, label="the test", device=CPU, requested="shared-memory")
    assert (
        connect(group, label="the test", device=CPU, requested="torch").reason
        == "set in the configuration"
    )
    return reasons


def test_all_ranks_decide_alike(pool):
    for reasons in pool.run(3, not_here):
        assert reasons == ["rank 1: another machine", "rank 1: another processor"]


def foreign_memory(rank, ranks):
    """What is found under the path on this machine is not what was offered: the nonce differs. Runs in a worker."""
    real = host_module._open

    def elsewhere(offer, total):
        return real((offer[0], b"x" * 32), total) if rank == 1 else real(offer, total)

    with patch.object(host_module, "_open", elsewhere):
        found = connect(dist.group.WORLD, label="the test", device=CPU)
    assert found.name == "torch"
    assert "memory is not the first rank's" in found.reason


def test_the_same_path_on_another_machine_is_found_out(pool):
    pool.run(2, foreign_memory)


def short_of_memory(rank, ranks):
    """Small collectives are shared, large ones go through torch; nothing changes for the caller. Runs in a worker."""
    with patch.object(host_module, "free_host_bytes", lambda: 2_000_000):
        way = shared()
        with count_traffic() as traffic:
            for numel in (100, 1_000_000, 200, 1_000_000):
                shard = numbers(rank, numel, torch.float32, whole=True)
                everyone = [numbers(r, numel, torch.float32, whole=True) for r in range(ranks)]
                assert torch.equal(gather(way, shard, ranks, ask=True), torch.cat(everyone))
                inputs = [
                    numbers(r, numel * ranks, torch.float32, whole=True) for r in range(ranks)
                ]
                assert torch.equal(
                    scatter(way, inputs[rank], ranks, ask=True),
                    sum(inputs[1:], inputs[0]).chunk(ranks)[rank],
                )
            buckets = way.buckets([flat(1_000_000)])
            buckets.buffers[0].fill_(rank)
            buckets.start(0)
            buckets.finish(0)
            assert torch.equal(
                buckets.buffers[0], torch.full((1_000_000,), float(sum(range(ranks))))
            )
        assert "all_to_all" in {call.kind for call in traffic.calls}, (
            "large reduce-scatters go through torch"
        )
        with pytest.raises(ConfigError, match="to share, and"):
            connect(
                dist.group.WORLD, label="the test", device=CPU, requested="shared-memory"
            ).buckets([flat(1_000_000)])


def test_short_of_memory(pool):
    pool.run(2, short_of_memory)


def out_of_step(rank, ranks):
    """Ranks that gather different amounts are told so. Runs in a worker."""
    way = shared()
    gather(way, torch.ones(100), ranks, ask=True)
    with pytest.raises(
        CommunicationError,
        match=r"all-gather over the test: rank \d gathers \d+ bytes and rank \d \d+, so the ranks issue",
    ):
        gather(way, torch.ones(10 + rank), ranks, ask=True)
    scatter(way, torch.ones(100 * ranks), ranks, ask=True)
    with pytest.raises(CommunicationError, match="reduce-scatter over the test: rank . reduces"):
        scatter(way, torch.ones((10 + rank) * ranks), ranks, ask=True)


def test_different_sizes_are_an_error(pool):
    pool.run(2, out_of_step)


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


@pytest.mark.parametrize(
    ("world", "stage", "replicas", "accumulation"),
    cover(
        ((*layout, accumulation) for layout in LAYOUTS for accumulation in (1, 3)),
        features=lambda world, stage, replicas, accumulation: (
            world,
            (stage, replicas),
            accumulation,
        ),
        cost=lambda world, *_: world,
    ),
)
def test_training_equals_one_process(pool, world, stage, replicas, accumulation):
    """float64, ragged, uneven shards."""
    config = settings(world, stage, replicas, accumulation)
    config["parallel"]["transport"] = "shared-memory"
    found = pool.run(world, train, "plain", True, config)[0]
    assert_same(reference("plain", True, world * accumulation), found)


def bf16_run(rank, world, config):
    """Losses, and the bytes of the last step. Runs in a worker."""
    model = cases.build("llama", tied=False, dtype=torch.float32)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    losses = []
    for step in cases.steps_for("llama", world, steps=3):
        with count_traffic() as traffic:
            losses.append(float(engine.train_batch(step[rank])))
    return losses, {kind: count for kind, count in traffic.bytes().items() if kind != "control"}


@pytest.mark.parametrize(
    ("stage", "wire"),
    cover(
        [
            (0, "fp32"),
            (1, "bf16"),
            (2, "fp32"),
            (3, "bf16"),
            (0, "bf16"),
            (1, "fp32"),
            (2, "bf16"),
            (3, "fp32"),
        ],
        strength=1,
    ),
)
def test_bf16_has_the_same_losses_and_bytes_as_torch(pool, stage, wire):
    """Two ranks: a sum of two numbers has no order, so losses are the same to the bit. The counted bytes are too."""
    config = settings(2, stage, 1, 1, bf16={"enabled": True}, communication_data_type=wire)
    results = []
    for transport in ("torch", "shared-memory"):
        if stage == 0 and transport == "shared-memory":
            transport = "auto"  # a bf16 stage 0 is one fully_shard unit a replica, whose all-reduce is torch's
        config["parallel"]["transport"] = transport
        results.append(pool.run(2, bf16_run, config))
    assert results[0] == results[1]


def counted(rank, world, config):
    """Bytes of a second step, in float32. Runs in a worker."""
    model = cases.build("llama", tied=False, dtype=torch.float32)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    pieces = cases.steps_for("llama", world, steps=2)
    engine.train_batch(pieces[0][rank])
    with count_traffic() as traffic:
        engine.train_batch(pieces[1][rank])
    return {kind: count for kind, count in traffic.bytes().items() if kind != "control"}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_are_counted(pool, stage):
    config = settings(2, stage, 1, 1)
    config["parallel"]["measure_seconds"] = (
        0  # or torch's collectives may be made of messages, which are counted as such
    )
    sent = {}
    for transport in ("torch", "shared-memory"):
        config["parallel"]["transport"] = transport
        sent[transport] = pool.run(2, counted, config)[0]
    assert sent["torch"] == sent["shared-memory"]
    assert sent["torch"]
