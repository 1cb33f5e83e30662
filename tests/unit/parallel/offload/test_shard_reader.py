"""Order of reads of shards in files, and computation during a read."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from plait._torch.units import replace_shard_buffers, sharded_modules
from plait.parallel.offload.arena import Arena, ShardPrefetcher

BLOCKS = 5
WIDTH = 64
UNIT_BYTES = WIDTH * WIDTH * 4
SECONDS = 20
"""Long enough for any machine. It is only reached if something waits for a later event."""


@pytest.fixture(params=[1, 2], ids=["one process", "two processes"])
def world(request):
    """Size of a fake world. torch copies the shards of one process by another call."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


class Inline(ThreadPoolExecutor):
    """Executor that runs functions at once, so that their order is that of the calls."""

    def submit(self, fn, /, *args, **kwargs):
        done = Future()
        done.set_result(fn(*args, **kwargs))
        return done


class RecordingArena(Arena):
    """Arena that records its events with the number of the block."""

    def __init__(self, folder):
        super().__init__(folder)
        self.events = []
        self.numbers = {}
        self.fetching = lambda number: None

    def fetch(self, tensor, *, write):
        number = self.numbers[tensor.data_ptr()]
        self.events.append(f"read {number}")
        self.fetching(number)
        super().fetch(tensor, write=write)

    def evict(self, tensor, *, written=True):
        if tensor.data_ptr() in self.numbers:
            assert not written
            self.events.append(f"give back {self.numbers[tensor.data_ptr()]}")
        super().evict(tensor, written=written)


class Block(nn.Module):
    """Block that reports when it computes."""

    def __init__(self, number, report):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.number = number
        self.report = report

    def forward(self, hidden):
        self.report(f"forward {self.number}")
        out = self.inner(hidden)
        if out.requires_grad:
            out.register_hook(lambda _: self.report(f"backward {self.number}"))
        # The gradient of the product is computed first, and gathers the weight.
        return out * 1


def build(folder, world, *, units, reader):
    """Build blocks in files, with a pool for the shards of `units` blocks."""
    arena = RecordingArena(folder)
    model = nn.Sequential(*(Block(number, arena.events.append) for number in range(BLOCKS)))
    mesh = init_device_mesh("cpu", (world,))
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    # The root, which comes first, has no parameters outside the blocks.
    blocks = sharded_modules(model)[1:]
    for number, block in enumerate(blocks):

        def copied(buffer, number=number):
            mapped = arena.copy(buffer)
            arena.numbers[mapped.data_ptr()] = number
            return mapped

        replace_shard_buffers(block, copied)
    pool_bytes = units * UNIT_BYTES // world
    prefetcher = ShardPrefetcher(arena, blocks, pool_bytes=pool_bytes, reader=reader)
    arena.events.clear()
    return model, arena, prefetcher


def step(model, prefetcher):
    model(torch.ones(2, WIDTH)).sum().backward()
    prefetcher.end_step()


def blocks_in_memory(events):
    """Return the numbers of the blocks in memory after each event."""
    numbers = set()
    for event in events:
        number = event.split()[-1]
        if event.startswith("read"):
            numbers.add(number)
        elif event.startswith("give"):
            numbers.discard(number)
        yield set(numbers)


def test_the_order_of_a_step(world, tmp_path):
    """Two of three blocks that have room are requested ahead of the one that computes.

    The last block of the forward stays for its backward, which torch gathers one block early.
    """
    model, arena, prefetcher = build(tmp_path, world, units=3, reader=Inline())
    step(model, prefetcher)
    # The first step does not know the order, so it reads nothing ahead.
    assert arena.events.index("read 1") > arena.events.index("forward 0")

    for _ in range(2):
        arena.events.clear()
        step(model, prefetcher)
        end = arena.events.index("forward 4") + 1
        forward = arena.events[:end]
        backward = arena.events[end:]
        reads = [event for event in forward if "read" in event or "forward" in event]
        assert reads == [
            *("read 0", "read 1", "read 2", "forward 0"),
            *("read 3", "forward 1", "read 4", "forward 2"),
            *("forward 3", "read 3", "read 2", "forward 4"),
        ]
        assert [event for event in backward if "read" in event] == ["read 1", "read 0"]
        assert backward.index("read 1") < backward.index("backward 4")
        assert backward.index("read 0") < backward.index("backward 3")

    in_memory = list(blocks_in_memory(arena.events))
    assert max(map(len, in_memory)) <= 3
    assert not in_memory[-1], "blocks stay in memory between two steps"


def test_evaluation_and_accumulation_have_their_own_orders(world, tmp_path):
    """Each order is read ahead from its second time on. Only shards that are used are read."""
    model, arena, prefetcher = build(tmp_path, world, units=2, reader=Inline())

    def evaluate():
        with torch.no_grad():
            model(torch.ones(2, WIDTH))

    def accumulate():
        for last in (False, True):
            model.set_requires_all_reduce(last)
            model(torch.ones(2, WIDTH)).sum().backward()
        prefetcher.end_step()

    for _ in range(3):
        accumulate()
        evaluate()
        evaluate()
    arena.events.clear()
    accumulate()
    reads = [event for event in arena.events if event.startswith("read")]
    # The last block is read once per micro-batch. The change of the order costs at most one read.
    gathers = 2 * (BLOCKS + BLOCKS - 1)
    assert len(reads) <= gathers + 1
    arena.events.clear()
    evaluate()
    ahead = [event for event in arena.events if "give" not in event]
    assert ahead.index("read 4") < ahead.index("forward 3")


def test_without_room_only_the_gathered_block_is_in_memory(world, tmp_path):
    model, arena, prefetcher = build(tmp_path, world, units=1, reader=Inline())
    for _ in range(2):
        arena.events.clear()
        step(model, prefetcher)
    expected = ["read 0", "give back 0", "forward 0", "read 1", "give back 1", "forward 1"]
    assert arena.events[:6] == expected


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_block_computes_while_the_next_is_read(world, tmp_path, direction):
    """Each read waits for the previous block to compute, so a block that waits for it hangs."""
    reader = ThreadPoolExecutor(1)
    model, arena, prefetcher = build(tmp_path, world, units=3, reader=reader)
    for _ in range(2):
        step(model, prefetcher)
    computes = [threading.Event() for _ in range(BLOCKS)]
    waited = []
    turn = threading.Event()

    def fetching(number):
        if turn.is_set() != (direction == "backward"):
            return
        # In backward torch gathers a block before the previous one has computed, so the block that
        # is read ahead is two further.
        previous = number - 1 if direction == "forward" else number + 2
        if 0 <= previous < BLOCKS:
            waited.append(computes[previous].wait(SECONDS))

    def report(event):
        kind, number = event.split()
        if kind == direction:
            computes[int(number)].set()

    for block in model:
        block.report = report
    arena.fetching = fetching
    output = model(torch.ones(2, WIDTH)).sum()
    if direction == "backward":
        # Only the prefetcher knows its reads. Those of the forward end before the backward begins.
        for future in prefetcher._ahead.values():
            future.result()
    turn.set()
    output.backward()
    prefetcher.end_step()
    assert waited
    assert all(waited)
