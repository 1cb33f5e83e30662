"""Shards in files: what is asked for when, in forward, at the turn and in backward; and that nobody waits for what is read ahead."""

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

BLOCKS, WIDTH = 5, 64
UNIT_BYTES = WIDTH * WIDTH * 4
SECONDS = 20
"""Long enough for any machine. It is only reached if something waits for a later event."""


@pytest.fixture(params=[1, 2], ids=["one process", "two processes"])
def world(request):
    """A fake world. torch copies full shards by another call than gathered ones."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


class Inline(ThreadPoolExecutor):
    """Executor that runs functions at once, so that their order is that of the calls."""

    def submit(self, fn, /, *args, **kwargs):
        done = Future()
        done.set_result(fn(*args, **kwargs))
        return done


class Watched(Arena):
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
    def __init__(self, number, tell):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.number, self.tell = number, tell

    def forward(self, hidden):
        self.tell(f"forward {self.number}")
        out = self.inner(hidden)
        if out.requires_grad:
            out.register_hook(lambda _: self.tell(f"backward {self.number}"))
        return out * 1  # whose gradient comes first, and gathers


def build(folder, world, *, units, reader):
    """Build blocks in files, with a pool for the shards of `units` blocks."""
    arena = Watched(folder)
    model = nn.Sequential(*(Block(number, arena.events.append) for number in range(BLOCKS)))
    mesh = init_device_mesh("cpu", (world,))
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    blocks = sharded_modules(model)[1:]  # the root has no parameters of its own
    for number, block in enumerate(blocks):

        def copied(buffer, number=number):
            mapped = arena.copy(buffer)
            arena.numbers[mapped.data_ptr()] = number
            return mapped

        replace_shard_buffers(block, copied)
    made = ShardPrefetcher(arena, blocks, pool_bytes=units * UNIT_BYTES // world, reader=reader)
    arena.events.clear()
    return model, arena, made


def step(model, made):
    model(torch.ones(2, WIDTH)).sum().backward()
    made.end_step()


def test_the_order_of_a_step(world, tmp_path):
    """With room for three blocks, two are requested ahead of the one that computes.

    The last block of the forward stays for its backward, which torch gathers one block early.
    """
    model, arena, made = build(tmp_path, world, units=3, reader=Inline())
    step(model, made)
    first = list(arena.events)
    assert first.index("read 1") > first.index("forward 0"), "nothing is known of the first step"
    for _ in range(2):
        arena.events.clear()
        step(model, made)
        end = arena.events.index("forward 4") + 1
        forward, backward = arena.events[:end], arena.events[end:]
        reads = [event for event in forward if "read" in event or "forward" in event]
        assert reads == [
            *("read 0", "read 1", "read 2", "forward 0"),
            *("read 3", "forward 1", "read 4", "forward 2"),
            *("forward 3", "read 3", "read 2", "forward 4"),
        ]
        assert [event for event in backward if "read" in event] == ["read 1", "read 0"]
        assert backward.index("read 1") < backward.index("backward 4")
        assert backward.index("read 0") < backward.index("backward 3")
    # At most three blocks at any time, and none between two steps.
    held = set()
    for event in arena.events:
        number = event.split()[-1]
        if event.startswith("read"):
            held.add(number)
        elif event.startswith("give"):
            held.discard(number)
        assert len(held) <= 3, event
    assert not held


def test_evaluations_and_accumulation_have_orders_of_their_own(world, tmp_path):
    """Each order is read ahead from its second time on. Apart from what follows a change, only used shards are read."""
    model, arena, made = build(tmp_path, world, units=2, reader=Inline())

    def evaluate():
        with torch.no_grad():
            model(torch.ones(2, WIDTH))

    def accumulate():
        for last in (False, True):
            model.set_requires_all_reduce(last)
            model(torch.ones(2, WIDTH)).sum().backward()
        made.end_step()

    for _ in range(3):
        accumulate()
        evaluate()
        evaluate()
    arena.events.clear()
    accumulate()
    reads = [event for event in arena.events if event.startswith("read")]
    gathers = 2 * (BLOCKS + BLOCKS - 1)  # the last block's shards are read once a micro-batch
    assert len(reads) <= gathers + 1
    arena.events.clear()
    evaluate()
    ahead = [event for event in arena.events if "give" not in event]
    assert ahead.index("read 4") < ahead.index("forward 3")


def test_without_room_only_the_gathered_block_is_in_memory(world, tmp_path):
    model, arena, made = build(tmp_path, world, units=1, reader=Inline())
    for _ in range(2):
        arena.events.clear()
        step(model, made)
    expected = ["read 0", "give back 0", "forward 0", "read 1", "give back 1", "forward 1"]
    assert arena.events[:6] == expected


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_blocks_compute_while_the_next_is_read(world, tmp_path, direction):
    """The reading of a block ends only when the block before it computes. Waiting for it would never end."""
    model, arena, made = build(tmp_path, world, units=3, reader=ThreadPoolExecutor(1))
    for _ in range(2):
        step(model, made)
    computes = [threading.Event() for _ in range(BLOCKS)]
    waited = []
    turn = threading.Event()

    def fetching(number):
        if turn.is_set() != (direction == "backward"):
            return
        # torch gathers a block in backward while the one before it has not computed yet, so what is read ahead is two further.
        before = number - 1 if direction == "forward" else number + 2
        if 0 <= before < BLOCKS:
            waited.append(computes[before].wait(SECONDS))

    def tell(event):
        kind, number = event.split()
        if kind == direction:
            computes[int(number)].set()

    for block in model:
        block.tell = tell
    arena.fetching = fetching
    output = model(torch.ones(2, WIDTH)).sum()
    if direction == "backward":
        for future in made._ahead.values():  # read ahead by the forward
            future.result()
    turn.set()
    output.backward()
    made.end_step()
    assert waited and all(waited)
