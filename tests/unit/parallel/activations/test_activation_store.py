"""Stores give back what they took, in time, and leave nothing behind."""

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
    """Return a function that adds `entry` to `calls` and calls `function`. `entry` may depend on the arguments."""

    def call(*args):
        calls.append(entry(*args) if callable(entry) else entry)
        return function(*args)

    return call


@pytest.fixture(params=["host", "disk"])
def store(request, tmp_path):
    """On a CPU the host store makes plain copies; its streams are for GPUs."""
    return HostStore(CPU) if request.param == "host" else DiskStore(tmp_path, CPU)


def test_what_is_put_comes_back(store):
    group = store.open(0)
    tensors = [flat(size, size) for size in (1, 4096, 100_000)]
    handles = [group.put(tensor) for tensor in tensors]
    for handle, tensor in reversed(list(zip(handles, tensors, strict=True))):
        assert torch.equal(group.get(handle), tensor)
        assert torch.equal(group.get(handle), tensor)


def test_the_block_before_starts_its_way_back(store):
    """The block after does not, nor does the last block of the forward before."""
    earlier = store.open(3)
    groups = [store.open(index) for index in range(3)]
    started = []
    for index, group in enumerate([*groups, earlier]):
        group.put(flat(10))
        group.prefetch = recorded(started, index, group.prefetch)
    store.prefetcher()()
    assert started == [2]
    groups[2].get(0)
    assert started == [2, 2, 1]
    groups[0].get(0)
    assert started == [2, 2, 1, 0]


def test_files_are_read_once(tmp_path, monkeypatch):
    """A block's tensors are read once, however often they are requested. Requesting one a second time reads it alone."""
    offsets = []
    read = recorded(offsets, lambda *args: args[2].offset, activation_store._read)
    monkeypatch.setattr(activation_store, "_read", read)
    group = DiskStore(tmp_path, CPU).open(0)
    handles = [group.put(flat(4096, seed)) for seed in range(3)]
    for seed, handle in enumerate(handles):
        assert torch.equal(group.get(handle), flat(4096, seed))
    assert sorted(offsets) == [0, 4096, 8192]
    assert torch.equal(group.get(handles[1]), flat(4096, 1))
    assert sorted(offsets) == [0, 4096, 4096, 8192]


def test_a_stage_begins_its_way_back_before_its_backward(store):
    """Micro-batches and stages of a rank are separate. A stage that ends with its own blocks waits for them."""
    stages = {index: SimpleNamespace(blocks=(f"{index}.a", f"{index}.b")) for index in (0, 2)}
    staged = StagePrefetcher(store, stages, ("0.a", "0.b", "2.a"))
    started = []

    def forward(stage, microbatch, blocks):
        staged(Action(stage, Kind.FORWARD, microbatch), False)
        groups = []
        for index in blocks:
            group = store.open(index)
            group.put(flat(10))
            group.prefetch = recorded(started, f"{microbatch}/{index}", group.prefetch)
            groups.append(group)
        staged(Action(stage, Kind.FORWARD, microbatch), True)
        return groups

    first, second = forward(0, 0, range(2)), forward(0, 1, range(2))
    third = forward(2, 0, range(2, 3))
    # Another stage and another micro-batch begin without a previous group.
    assert third[0].previous is None and second[0].previous is None
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
    gc.collect()  # files of other tests
    before = len(os.listdir("/proc/self/fd"))
    del group
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = DiskStore(tmp_path, CPU)
    group = store.open(0)
    monkeypatch.setattr(activation_store.os, "pwrite", full)
    handle = group.put(flat(5000))
    with pytest.raises(PlaitError, match=r"No space left on device; free some space there"):
        group.get(handle)
    with pytest.raises(PlaitError, match="No space left"):
        group.put(flat(5000))
    store.wait_for_room(store._limit)  # what failed waits no longer


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(PlaitError, match="parallel.activation_offload.path"):
        DiskStore(file / "folder", CPU)


def test_a_write_before_the_disk_has_it_is_refused(tmp_path, monkeypatch):
    """torch also refuses a backward through a modified tensor. Without such a backward, nothing is refused."""
    gate, write = threading.Event(), os.pwrite
    slow = recorded([], lambda *args: gate.wait(10), write)
    monkeypatch.setattr(activation_store.os, "pwrite", slow)
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
    """At most the limit is kept in memory."""
    gate = threading.Event()
    slow = recorded([], lambda *args: gate.wait(10), os.pwrite)
    monkeypatch.setattr(activation_store.os, "pwrite", slow)
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


def test_each_storage_is_moved_once_and_shared_ones_stay(store):
    """The input and the product are moved; the mask and the weight are not."""
    sizes = []
    open_group = store.open

    def opened(index):
        group = open_group(index)
        group.put = recorded(sizes, lambda tensor: tensor.numel(), group.put)
        return group

    store.open = opened
    block = Block()
    hidden, mask = torch.randn(16, 64, requires_grad=True), torch.rand(16, 32)
    expected = torch.autograd.grad(block(hidden, mask), [hidden, *block.parameters()])
    saved = SavedTensors(block, store=store, partition=None, index=0)
    with saved.hooks((hidden, mask), {}):
        out = block(hidden, mask)
    gradients = torch.autograd.grad(out, [hidden, *block.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))
    assert sizes == [16 * 64 * 4, 16 * 64 * 4]


def test_what_is_saved_again_after_a_write_is_another(store):
    """A storage is saved for a product without a backward, written to, and saved again for a product that has one."""
    factors = torch.randn(2, 1024, requires_grad=True)
    hidden = torch.randn(1024)
    with SavedTensors(nn.Identity(), store=store, partition=None, index=0).hooks((), {}):
        unused = factors[0] * hidden
        hidden.mul_(2)  # after which torch refuses the backward of `unused`
        used = factors[1] * hidden
    (found,) = torch.autograd.grad(used.sum(), [factors])
    assert torch.equal(found, torch.stack([torch.zeros_like(hidden), hidden]))
    assert unused.requires_grad


@pytest.mark.parametrize(
    ("technique", "compiled", "device", "words"),
    [
        (ActivationOffload(fraction=1.0), False, "cpu", "so a copy frees nothing"),
        (ActivationOffload(fraction=0.1, device="disk", path="x"), False, "cpu", "less than half a block, because the model has 3; use 0.333"),
        (ActivationOffload(fraction=1.0), True, "cuda", "the compiler decides"),
    ],
)  # fmt: skip
def test_refusals(technique, compiled, device, words):
    techniques = (Compile(enabled=compiled),)
    model = {"device_type": device, "model": nn.Identity(), "blocks": ("a", "b", "c")}
    context = TechniqueContext(Layout(), techniques, **model)
    with pytest.raises(ConfigError, match=words):
        technique.check(context)
    with pytest.raises(ModelError, match="no repeated blocks"):
        technique.check(replace(context, blocks=()))


def test_host_buffers_serve_other_lengths():
    """B11: a hundred lengths take no more memory than one of them. What is in use at once decides."""
    store = HostStore(CPU)
    for size in [*range(1000, 2000, 50), *range(5000, 6000, 50), 0]:
        group = store.open(0)
        handles = [group.put(flat(size, seed)) for seed in range(3)]
        for seed, handle in enumerate(handles):
            assert torch.equal(group.get(handle), flat(size, seed))
        assert torch.equal(group.get(handles[1]), flat(size, 1))
        del group
        assert sum(len(buffers) for buffers in store._free.values()) <= 6
    free = sum(buffer.numel() for buffers in store._free.values() for buffer, _ in buffers)
    assert store._total_bytes == free <= store._peak_used_bytes == 3 * 8192
    assert store._used_bytes == 0
