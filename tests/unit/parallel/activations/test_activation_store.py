"""Stores return the tensors they were given, prefetch them in time, and leave nothing behind."""

import errno
import gc
import os
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from plait.cluster.layout import Layout
from plait.errors import ConfigError, ModelError, PlaitError
from plait.parallel.activations import activation_store
from plait.parallel.activations.activation_store import DiskStore, HostStore, SavedTensors
from plait.parallel.schedules.schedule import Action, Kind
from plait.parallel.technique import TechniqueContext
from plait.parallel.techniques.compile import Compile
from plait.parallel.techniques.offload import ActivationOffload
from plait.parallel.techniques.pipeline_parallel import StagePrefetcher

CPU = torch.device("cpu")


def flat(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def recorded(calls, entry, function):
    """Return a function that adds `entry(*args)` to `calls` and calls `function`."""

    def call(*args):
        calls.append(entry(*args))
        return function(*args)

    return call


def closed_gate(monkeypatch):
    """Return an event. Nothing is written to files until it is set."""
    gate = threading.Event()
    slow = recorded([], lambda *_: gate.wait(10), os.pwrite)
    # A disk that is slow at the right moment cannot be had otherwise.
    monkeypatch.setattr(activation_store.os, "pwrite", slow)
    return gate


def stored_group(store, index, started, name):
    """Return a group with one tensor that adds `name` to `started` when it is prefetched."""
    group = store.open(index)
    group.put(flat(10))
    group.prefetch = recorded(started, lambda *_: name, group.prefetch)
    return group


@pytest.fixture(params=["host", "disk"])
def store(request, tmp_path):
    """Store of each kind. On a CPU the host store makes plain copies without streams."""
    return HostStore(CPU) if request.param == "host" else DiskStore(tmp_path, CPU)


def test_stored_tensors_come_back(store):
    group = store.open(0)
    tensors = [flat(size, size) for size in (1, 4096, 100_000)]
    handles = [group.put(tensor) for tensor in tensors]
    for handle, tensor in reversed(list(zip(handles, tensors, strict=True))):
        for _ in range(2):
            assert torch.equal(group.get(handle), tensor)


def test_reading_a_block_prefetches_the_previous_one(store):
    """The next block is not prefetched, nor the last block of the previous forward."""
    started = []
    stored_group(store, 3, started, "previous forward")
    groups = [stored_group(store, index, started, index) for index in range(3)]
    store.prefetcher()()
    assert started == [2]
    groups[2].get(0)
    assert started == [2, 2, 1]
    groups[0].get(0)
    assert started == [2, 2, 1, 0]


def test_files_are_read_once(tmp_path, monkeypatch):
    """A block's tensors are read together. A second request of one reads only that one."""
    offsets = []
    read = recorded(offsets, lambda *args: args[2].offset, activation_store._read)
    # Only the function that reads knows the offsets, because the files have no name.
    monkeypatch.setattr(activation_store, "_read", read)
    group = DiskStore(tmp_path, CPU).open(0)
    handles = [group.put(flat(4096, seed)) for seed in range(3)]
    for seed, handle in enumerate(handles):
        assert torch.equal(group.get(handle), flat(4096, seed))
    assert sorted(offsets) == [0, 4096, 8192]
    assert torch.equal(group.get(handles[1]), flat(4096, 1))
    assert sorted(offsets) == [0, 4096, 4096, 8192]


def test_a_stage_prefetches_before_its_backward(store):
    """Micro-batches and stages of a rank are separate."""
    stages = {index: SimpleNamespace(blocks=(f"{index}.a", f"{index}.b")) for index in (0, 2)}
    staged = StagePrefetcher(store, stages, ("0.a", "0.b", "2.a"))
    started = []

    def forward(stage, microbatch, blocks):
        staged(Action(stage, Kind.FORWARD, microbatch), False)
        groups = [stored_group(store, index, started, f"{microbatch}/{index}") for index in blocks]
        staged(Action(stage, Kind.FORWARD, microbatch), True)
        return groups

    first = forward(0, 0, range(2))
    second = forward(0, 1, range(2))
    third = forward(2, 0, range(2, 3))
    # Another stage and another micro-batch begin without a previous group.
    assert second[0].previous is None
    assert third[0].previous is None

    # Stage 2 ends with the last block of the model, whose tensors its backward reads at once.
    staged(Action(2, Kind.BACKWARD, 0), False)
    assert started == []
    staged(Action(0, Kind.INPUT, 0), False)
    assert started == ["0/1"]
    staged(Action(0, Kind.WEIGHT, 0), False)
    staged(Action(0, Kind.BACKWARD, 1), False)
    assert started == ["0/1", "1/1"]
    assert torch.equal(first[1].get(0), flat(10))


def test_files_have_no_name_and_are_closed(tmp_path):
    store = DiskStore(tmp_path, CPU)
    group = store.open(0)
    handle = group.put(flat(5000))
    assert torch.equal(group.get(handle), flat(5000))
    assert list(tmp_path.iterdir()) == []
    # Files of other tests are closed first.
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    del group
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_a_full_disk_is_reported(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = DiskStore(tmp_path, CPU)
    group = store.open(0)
    # A full disk cannot be had otherwise.
    monkeypatch.setattr(activation_store.os, "pwrite", full)
    handle = group.put(flat(5000))
    with pytest.raises(PlaitError, match=r"No space left on device; free some space there"):
        group.get(handle)
    with pytest.raises(PlaitError, match="No space left"):
        group.put(flat(5000))
    # A failed write no longer counts as pending.
    store.wait_for_room(store._limit)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(PlaitError, match="parallel.activation_offload.path"):
        DiskStore(file / "folder", CPU)


def test_a_tensor_modified_before_it_is_stored_is_refused(tmp_path, monkeypatch):
    """It is refused only when it is read: torch refuses a backward through it, too."""
    gate = closed_gate(monkeypatch)
    hidden = torch.arange(4096.0)
    group = DiskStore(tmp_path, CPU).open(0)
    handle = group.put(hidden.detach().view(torch.uint8))
    hidden.mul_(2)
    gate.set()
    again = group.put(hidden.detach().view(torch.uint8))
    assert torch.equal(group.get(again).view(torch.float32), hidden)
    with pytest.raises(ModelError, match="modified in place before it was stored"):
        group.get(handle)


def test_forward_waits_for_a_slow_disk(tmp_path, monkeypatch):
    """The limit of pending bytes is never exceeded."""
    gate = closed_gate(monkeypatch)
    store = DiskStore(tmp_path, CPU, pending_bytes=2500)
    group = store.open(0)
    group.put(flat(1000))
    group.put(flat(1000))
    waiting = threading.Thread(target=group.put, args=(flat(1000, 3),))
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    gate.set()
    waiting.join(10)
    assert torch.equal(group.get(2), flat(1000, 3))


class Block(nn.Module):
    """Saves its input twice, a view of a product, and a mask that is shared."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, hidden, mask):
        y = self.linear(hidden)
        return torch.sin(y[:, :32]).sum() + (torch.cos(y[:, 32:]) * mask).sum() + hidden.sin().sum()


def test_each_storage_is_moved_once(store):
    """The input and the product are moved. The mask and the weight stay."""
    sizes = []
    open_group = store.open

    def opened(index):
        group = open_group(index)
        group.put = recorded(sizes, lambda tensor: tensor.numel(), group.put)
        return group

    store.open = opened
    block = Block()
    hidden = torch.randn(16, 64, requires_grad=True)
    mask = torch.rand(16, 32)
    expected = torch.autograd.grad(block(hidden, mask), [hidden, *block.parameters()])
    saved = SavedTensors(block, store=store, partition=None, index=0)
    with saved.hooks((hidden, mask), {}):
        out = block(hidden, mask)
    gradients = torch.autograd.grad(out, [hidden, *block.parameters()])
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
    assert sizes == [16 * 64 * 4, 16 * 64 * 4]


def test_a_storage_is_saved_again_after_a_write(store):
    """The first product has no backward, so torch does not notice the write."""
    factors = torch.randn(2, 1024, requires_grad=True)
    hidden = torch.randn(1024)
    with SavedTensors(nn.Identity(), store=store, partition=None, index=0).hooks((), {}):
        unused = factors[0] * hidden
        # From here on torch would refuse the backward of `unused`.
        hidden.mul_(2)
        used = factors[1] * hidden
    (gradient,) = torch.autograd.grad(used.sum(), [factors])
    assert torch.equal(gradient, torch.stack([torch.zeros_like(hidden), hidden]))
    assert unused.requires_grad


@pytest.mark.parametrize(
    ("technique", "compiled", "device", "message"),
    [
        (ActivationOffload(fraction=1.0), False, "cpu", "so a copy frees nothing"),
        (
            ActivationOffload(fraction=0.1, device="disk", path="x"),
            False,
            "cpu",
            "less than half a block, because the model has 3; use 0.333",
        ),
        (ActivationOffload(fraction=1.0), True, "cuda", "the compiler decides"),
    ],
)
def test_refusals(technique, compiled, device, message):
    techniques = (Compile(enabled=compiled),)
    model = {"device_type": device, "model": nn.Identity(), "blocks": ("a", "b", "c")}
    context = TechniqueContext(Layout(), techniques, **model)
    with pytest.raises(ConfigError, match=message):
        technique.check(context)
    with pytest.raises(ModelError, match="no repeated blocks"):
        technique.check(replace(context, blocks=()))


def test_host_buffers_are_reused_for_other_lengths():
    """Forty lengths need no more memory than what is in use at the same time."""
    store = HostStore(CPU)
    for size in [*range(1000, 2000, 50), *range(5000, 6000, 50), 0]:
        group = store.open(0)
        handles = [group.put(flat(size, seed)) for seed in range(3)]
        for seed, handle in enumerate(handles):
            assert torch.equal(group.get(handle), flat(size, seed))
        assert torch.equal(group.get(handles[1]), flat(size, 1))
        del group
        # Only the store knows its free buffers.
        assert sum(len(buffers) for buffers in store._free.values()) <= 6
    free = sum(buffer.numel() for buffers in store._free.values() for buffer, _ in buffers)
    assert store._total_bytes == free <= store._peak_used_bytes == 3 * 8192
    assert store._used_bytes == 0
