"""Waits for the device. Each test reaches one place of the package with little other code.

`make waits` removes each wait in turn and runs these tests, almost all of which must fail then.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from plait.comm import measure
from plait.comm.all_reduce import Flat, run, sum_over
from plait.comm.collectives import AsyncAllReduce
from plait.comm.compress import PowerSGDBuckets, QuantisedBuckets
from plait.comm.messages import Messenger
from plait.engine import calibration, single_rank
from plait.parallel.activations.activation_store import DiskStore, HostStore
from tests.parity import pipelines, tensor_parallel
from tests.simulated_device.runs import config_of, in_stages, on_axes, resumed

CUDA = torch.device("cuda", 0)


def host_store(rank, world):
    """Buffers are reused while the device is behind, and tensors read twice. Runs on every rank."""

    def values(length, block, number):
        return torch.arange(length * 4, device=CUDA).view(torch.uint8)[:length] + block + number

    store = HostStore(CUDA)
    for length in (1000, 900, 1000):
        store.begin()
        groups = []
        handles = []
        for block in range(3):
            group = store.open(block)
            tensors = [values(length, block, number) for number in range(2)]
            before = _device().copies()
            handles.append([group.put(tensor) for tensor in tensors])
            # The program does not wait for the copies.
            assert _device().copies()["deferred"] - before["deferred"] == 2
            groups.append(group)
            del tensors
        before = _device().copies()
        for block in (2, 1, 0):
            for number, handle in enumerate(handles[block]):
                restored = groups[block].get(handle)
                assert torch.equal(restored, values(length, block, number))
                del restored
            start = groups[block].get(handles[block][0])[:4].cpu()
            assert torch.equal(start, torch.arange(16).view(torch.uint8)[:4] + block)
        # The next block is prefetched without a wait.
        assert _device().copies()["deferred"] - before["deferred"] == 6
        groups.clear()
        del group
    unused = store.open(0)
    unused.put(torch.ones(700, dtype=torch.uint8, device=CUDA))
    unused.prefetch()
    del unused  # its buffer is reused while the prefetch may read it
    _returned_in_turn(store)
    group = store.open(0)
    # The list keeps the tensors, because freeing them would end the copies.
    tensors = [torch.full((700,), value, dtype=torch.uint8, device=CUDA) for value in (0, 1)]
    for tensor in tensors:
        group.put(tensor)
    store.drain()
    assert group._values[1].tolist() == [1] * 700
    del group, tensors
    pinned = _device().pinned_bytes()
    store.close()
    assert _device().pinned_bytes() < pinned


def _returned_in_turn(store):
    """Free memory of the side stream after a computation, while the next block is prefetched."""
    store.begin()
    groups = [store.open(block) for block in range(3)]
    handles = [
        group.put(torch.full((700,), block, dtype=torch.uint8, device=CUDA))
        for block, group in enumerate(groups)
    ]
    sums = []
    for group, handle in zip(reversed(groups), reversed(handles), strict=True):
        restored = group.get(handle)
        sums.append(restored.sum())
        del restored
    assert [int(total) for total in sums] == [1400, 700, 0]


def disk_store(rank, world, folder):
    """Runs on every rank."""
    store = DiskStore(Path(folder), CUDA)
    before = _device().copies()
    group = store.open(0)
    # The list keeps the tensors, because freeing them would end the copies.
    tensors = [torch.full((5000,), value, dtype=torch.uint8, device=CUDA) for value in (1, 2)]
    handles = [group.put(tensor) for tensor in tensors]
    # The program does not wait for the copies.
    assert _device().copies()["deferred"] - before["deferred"] == 2
    store.drain()
    for value, handle in enumerate(handles, 1):
        assert bool((group.get(handle) == value).all())
    store.close()


def test_stores(simulated, tmp_path):
    simulated.run(1, host_store)
    simulated.run(1, disk_store, str(tmp_path))


@pytest.mark.parametrize(("kind", "unused_parameters"), [("plain", True), ("llama", False)])
def test_reductions(simulated, kind, unused_parameters):
    """Buckets of gradients, the norm and sums of weights are waited for.

    With unused parameters, the answer of who used them comes behind all buckets and orders them.
    """
    config = on_axes(1, 2, 0, "plain", "on the device")
    config["parallel"]["unused_parameters"] = unused_parameters
    config["parallel"]["all_reduce"] = "all-reduce"  # independent of a measurement
    tensor_parallel.check(simulated, 2, kind, True, config)


@pytest.mark.parametrize("algorithm", ["ring", "recursive-doubling", "reduce-scatter+all-gather"])
def test_composed_all_reduces(simulated, algorithm):
    """The hops of an all-reduce wait for each other."""
    world = 4 if algorithm == "recursive-doubling" else 2
    parallel = {"tp": 1, "all_reduce": algorithm, "bucket_mib": 0.002}
    config = config_of(world, 0, parallel=parallel)
    tensor_parallel.check(simulated, world, "plain", True, config)


def composed(rank, world):
    """Run an all-reduce, an exchange of a measurement, and a timed copy. Runs on every rank."""
    device = torch.device("cuda", rank)
    group = dist.group.WORLD
    x = torch.full((8,), float(rank + 1), device=device)
    run(sum_over(x, group, algorithm="ring"))
    summed = x.tolist()
    incoming = torch.empty(1, device=device)
    measure._exchange(torch.full((1,), float(rank), device=device), incoming, group, 1)
    exchanged = float(incoming)
    host = torch.empty(8, pin_memory=True)
    measure._timed(lambda: host.copy_(x, non_blocking=True), group, device)
    return summed, exchanged, host.tolist()


def test_composed_and_measured(simulated):
    """A time is read when the device is done."""
    sums = [3.0] * 8
    assert simulated.run(2, composed) == [(sums, 1.0, sums), (sums, 0.0, sums)]


class Watch:
    """Replaces `time`, and records at every reading whether the device is behind."""

    def __init__(self, monkeypatch, *modules):
        self.behind: list[bool] = []
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self):
        self.behind.append(bool(_device().behind()))
        return float(len(self.behind))


def timed(rank, world):
    """Read the clock twice around every product and a profiled step. Runs on every rank."""
    torch.cuda.synchronize()
    with pytest.MonkeyPatch.context() as monkeypatch:
        watch = Watch(monkeypatch, calibration, single_rank)
        calibration.measure_products([(4, 4, 4)], dtype=torch.float32, device=CUDA)
        products = watch.behind
        watch.behind = []
        x = torch.ones(4, device=CUDA)
        profile = single_rank._DeviceProfile(SimpleNamespace(device=CUDA))
        with profile.step():
            x.add_(1)
        return products, watch.behind


def test_times_are_taken_when_the_device_is_done(simulated):
    """A profiled step also begins when the device is done."""
    products, step = simulated.run(1, timed)[0]
    assert len(products) == 14 and not any(products[1::2])
    assert step == [False, False]


@pytest.mark.parametrize(("stage", "algorithm"), [(0, "int8"), (0, "powersgd"), (2, "int8")])
def test_compression_equals_the_cpu(simulated, pool, stage, algorithm, tmp_path):
    config = config_of(2, stage, parallel={"compress_gradients": algorithm})
    on_device, *_ = simulated.run(2, resumed, config, str(tmp_path / "device"), torch.float32)[0]
    on_cpu, *_ = pool.run(2, resumed, config, str(tmp_path / "cpu"), torch.float32)[0]
    assert on_device.losses == pytest.approx(on_cpu.losses, rel=1e-3)


def in_buckets(rank, world, device):
    """Return sums of four buckets in both compressions. Runs on every rank.

    Four are more than are on their first hop at the same time.
    """
    assert dist.group.WORLD is not None
    flats = [Flat(torch.float32, ((16, 16), (24, 16))) for _ in range(4)]
    target = torch.device(device, rank) if device == "cuda" else torch.device(device)
    sums = []
    for buckets in (
        PowerSGDBuckets(dist.group.WORLD, flats, target, rank=2, uncompressed_steps=1),
        QuantisedBuckets(dist.group.WORLD, flats, target, bits=8, feedback=True),
    ):
        for step in range(3):
            for index, buffer in enumerate(buckets.buffers):
                buffer.copy_(
                    torch.linspace(0, 1 + rank + index + step, buffer.numel(), device=target)
                )
                buckets.start(index)
            for index, buffer in enumerate(buckets.buffers):
                buckets.finish(index)
                sums.append(buffer[::64].tolist())
    return sums


def test_compressed_buckets(simulated, pool):
    """The sums are those of the CPU, also in the first step of PowerSGD, which sends no factors."""
    np.testing.assert_allclose(
        simulated.run(2, in_buckets, "cuda")[0],
        pool.run(2, in_buckets, "cpu")[0],
        rtol=1e-4,
        atol=1e-4,
    )


def messages(rank, world):
    """Runs on every rank."""
    groups = [dist.new_group(range(world)) for _ in range(2)]
    messenger = Messenger([(groups[0], groups[1])], device=torch.device("cuda", rank))
    received = []
    for number in range(2):
        if rank == 0:
            messenger.send_object({"number": number}, to=1)
            tensor = torch.full((50_000,), float(number), device="cuda")
            messenger.send([tensor], to=1)
            messenger.finish()
            tensor.add_(1)  # allowed, because the tensor is delivered
        else:
            message = messenger.receive_object(source=0)
            (tensor,) = messenger.receive([(torch.Size([50_000]), torch.float32)], source=0).wait()
            received += [message["number"], int(tensor.sum()) // 50_000]
    return received


def test_messages(simulated):
    """Objects and tensors pass between two stages."""
    assert simulated.run(2, messages)[1] == [0, 0, 1, 1]
    config = in_stages("1f1b", 2, 1, 1, 0, "plain")
    pipelines.check(simulated, 2, "plain", True, config)


def test_overlapped_products(simulated):
    """Row-parallel products are cut, and gradients of inputs overlap with those of weights."""
    config = on_axes(2, 1, 0, "plain", "on the device")
    config["parallel"]["tensor_overlap"] = 2
    tensor_parallel.check(simulated, 2, "llama", True, config)


def pending(rank, world):
    """Runs on every rank."""
    value = torch.full((1,), float(rank + 1), device=f"cuda:{rank}")
    return float(AsyncAllReduce(value, dist.group.WORLD).value())


def test_pending_sum(simulated):
    assert simulated.run(2, pending) == [3.0, 3.0]


def _device():
    return sys.modules["simulated_device.on_torch"]
