"""What waits for what, one place of the package at a time, in as little as reaches it. `make waits` takes each wait out in turn
and runs these: all but a few must fail then."""

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
    """Buffers are used again while the device is behind; a tensor may be asked for twice. Runs in a worker."""
    store = HostStore(CUDA)
    for length in (1000, 900, 1000):
        store.begin()
        groups, handles = [], []
        for block in range(3):
            group = store.open(block)
            made = [
                torch.arange(length * 4, device=CUDA).view(torch.uint8)[:length] + block + number
                for number in range(2)
            ]
            before = _device().copies()
            handles.append([group.put(tensor) for tensor in made])
            assert _device().copies()["deferred"] - before["deferred"] == 2, (
                "the program does not wait for the copies"
            )
            groups.append(group)
            del made
        before = _device().copies()
        for block in (2, 1, 0):
            for number, handle in enumerate(handles[block]):
                found = groups[block].get(handle)
                assert torch.equal(
                    found,
                    torch.arange(length * 4, device=CUDA).view(torch.uint8)[:length]
                    + block
                    + number,
                )
                del found
            assert torch.equal(
                groups[block].get(handles[block][0])[:4].cpu(),
                torch.arange(16).view(torch.uint8)[:4] + block,
            )
        assert _device().copies()["deferred"] - before["deferred"] == 6, (
            "prefetched without waiting"
        )
        groups.clear()
        del group
    unused = store.open(0)
    unused.put(torch.ones(700, dtype=torch.uint8, device=CUDA))
    unused.prefetch()
    del unused  # its buffer is used again while the copy that nobody asked for may read it
    _returned_in_turn(store)
    put, kept = (
        store.open(0),
        [torch.full((700,), value, dtype=torch.uint8, device=CUDA) for value in (0, 1)],
    )
    for tensor in kept:  # not freed, which would end the copies
        put.put(tensor)
    store.drain()
    assert put._values[1].tolist() == [1] * 700
    del put, kept
    held = _device().pinned_bytes()
    store.close()
    assert _device().pinned_bytes() < held


def _returned_in_turn(store):
    """Memory of the side stream is used by the computation and freed, while the next block is prefetched; the host waits for nothing."""
    store.begin()
    groups = [store.open(block) for block in range(3)]
    handles = [
        group.put(torch.full((700,), block, dtype=torch.uint8, device=CUDA))
        for block, group in enumerate(groups)
    ]
    sums = []
    for group, handle in zip(reversed(groups), reversed(handles), strict=True):
        found = group.get(handle)
        sums.append(found.sum())
        del found
    assert [int(total) for total in sums] == [1400, 700, 0]


def disk_store(rank, world, folder):
    """Runs in a worker."""
    store, before = DiskStore(Path(folder), CUDA), _device().copies()
    group = store.open(0)
    kept = [
        torch.full((5000,), value, dtype=torch.uint8, device=CUDA) for value in (1, 2)
    ]  # freeing them would end the copies
    handles = [group.put(tensor) for tensor in kept]
    assert _device().copies()["deferred"] - before["deferred"] == 2, (
        "the program does not wait for the copies"
    )
    store.drain()
    for value, handle in enumerate(handles, 1):
        assert bool((group.get(handle) == value).all())
    store.close()


def test_stores(simulated, tmp_path):
    """Bit for bit."""
    simulated.run(1, host_store)
    simulated.run(1, disk_store, str(tmp_path))


@pytest.mark.parametrize(("kind", "unused_parameters"), [("plain", True), ("llama", False)])
def test_reductions(simulated, kind, unused_parameters):
    """Buckets of gradients, the norm, sums of weights. Where ranks ask each other who used what, that answer comes behind all buckets and
    orders them too."""
    config = on_axes(1, 2, 0, "plain", "on the device")
    config["parallel"] |= {
        "unused_parameters": unused_parameters,
        "all_reduce": "all-reduce",
    }  # not what a measurement says
    tensor_parallel.check(simulated, 2, kind, True, config)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["ring", "recursive-doubling", "reduce-scatter+all-gather"])
def test_composed_all_reduces(simulated, algorithm):
    """Their steps follow each other."""
    config = config_of(
        4 if algorithm == "recursive-doubling" else 2, 0, parallel={"all_reduce": algorithm}
    )
    config["parallel"]["bucket_mib"] = 0.002
    world = config["parallel"]["dp_replicate"]
    tensor_parallel.check(
        simulated, world, "plain", True, {**config, "parallel": {"tp": 1, **config["parallel"]}}
    )  # type: ignore[arg-type]


def composed(rank, world):
    """One all-reduce to its end, an exchange of the measurement, and what a timed operation leaves for the host. Runs in a worker."""
    device, group = torch.device("cuda", rank), dist.group.WORLD
    x = torch.full((8,), float(rank + 1), device=device)
    run(sum_over(x, group, algorithm="ring"))
    summed = x.tolist()
    incoming = torch.empty(1, device=device)
    measure._exchange(torch.full((1,), float(rank), device=device), incoming, group, 1)
    came = float(incoming)
    host = torch.empty(8, pin_memory=True)
    measure._timed(lambda: host.copy_(x, non_blocking=True), group, device)
    return summed, came, host.tolist()


def test_composed_and_measured(simulated):
    """A time is taken when the device is done."""
    assert simulated.run(2, composed) == [
        ([3.0] * 8, float(1 - rank), [3.0] * 8) for rank in range(2)
    ]


class Watch:
    """In place of `time`: whether the device was behind whenever somebody looked."""

    def __init__(self, monkeypatch, *modules):
        self.behind: list[bool] = []
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self):
        self.behind.append(bool(_device().behind()))
        return float(len(self.behind))


def timed(rank, world):
    """The clock is looked at twice around every product, and around a step that is profiled. Runs in a worker."""
    torch.cuda.synchronize()
    with pytest.MonkeyPatch.context() as monkeypatch:
        watch = Watch(monkeypatch, calibration, single_rank)
        calibration.measure_products([(4, 4, 4)], dtype=torch.float32, device=CUDA)
        products, watch.behind = watch.behind, []
        x = torch.ones(4, device=CUDA)
        with single_rank._DeviceProfile(SimpleNamespace(device=CUDA)).step():  # type: ignore[arg-type]
            x.add_(1)
        return products, watch.behind


def test_times_are_taken_when_the_device_is_done(simulated):
    """And a step that is profiled begins when it is."""
    products, step = simulated.run(1, timed)[0]
    assert len(products) == 14 and not any(products[1::2])
    assert step == [False, False]


@pytest.mark.parametrize("way", ["int8", "powersgd", "sharded"])
def test_compressed(simulated, pool, way, tmp_path):
    """As on the CPU."""
    config = config_of(
        2,
        2 if way == "sharded" else 0,
        parallel={"compress_gradients": "int8" if way == "sharded" else way},
    )
    device, cpu = (
        p.run(2, resumed, config, str(tmp_path / str(i)), torch.float32)[0][0]
        for i, p in enumerate((simulated, pool))
    )
    assert device.losses == pytest.approx(cpu.losses, rel=1e-3)


def in_buckets(rank, world, device):
    """Sums of four buckets, more than are on their first hop at once, in both compressions. Runs in a worker."""
    assert dist.group.WORLD is not None
    flats = [Flat(torch.float32, ((16, 16), (24, 16))) for _ in range(4)]
    at, found = torch.device(device, rank) if device == "cuda" else torch.device(device), []
    for buckets in (
        PowerSGDBuckets(dist.group.WORLD, flats, at, rank=2, uncompressed_steps=1),
        QuantisedBuckets(dist.group.WORLD, flats, at, bits=8, feedback=True),
    ):
        for step in range(3):
            for index, buffer in enumerate(buckets.buffers):
                buffer.copy_(torch.linspace(0, 1 + rank + index + step, buffer.numel(), device=at))
                buckets.start(index)
            for index, buffer in enumerate(buckets.buffers):
                buckets.finish(index)
                found.append(buffer[::64].tolist())
    return found


def test_compressed_buckets(simulated, pool):
    """As on the CPU; PowerSGD in its first step, which is not compressed, and behind it."""
    np.testing.assert_allclose(
        simulated.run(2, in_buckets, "cuda")[0],
        pool.run(2, in_buckets, "cpu")[0],
        rtol=1e-4,
        atol=1e-4,
    )


def messages(rank, world):
    """Runs in a worker."""
    groups = [dist.new_group(range(world)) for _ in range(2)]
    messenger = Messenger([(groups[0], groups[1])], device=torch.device("cuda", rank))
    found = []
    for number in range(2):
        if rank == 0:
            messenger.send_object({"number": number}, to=1)
            tensor = torch.full((50_000,), float(number), device="cuda")
            messenger.send([tensor], to=1)
            messenger.finish()
            tensor.add_(1)  # delivered, so it is the sender's again
        else:
            told = messenger.receive_object(source=0)
            (tensor,) = messenger.receive([(torch.Size([50_000]), torch.float32)], source=0).wait()
            found += [told["number"], int(tensor.sum()) // 50_000]
    return found


def test_messages(simulated):
    """Between two stages: objects, tensors, and the end."""
    assert simulated.run(2, messages)[1] == [0, 0, 1, 1]
    pipelines.check(simulated, 2, "plain", True, in_stages("1f1b", 2, 1, 1, 0, "plain"))  # type: ignore[arg-type]


def test_overlapped_products(simulated):
    """Row-parallel products in pieces, gradients of inputs beside those of weights."""
    tensor_parallel.check(
        simulated, 2, "llama", True, on_axes(2, 1, 0, "plain", "on the device") | _overlap()
    )  # type: ignore[arg-type]


def _overlap():
    config = on_axes(2, 1, 0, "plain", "on the device")
    return {"parallel": {**config["parallel"], "tensor_overlap": 2}}


def pending(rank, world):
    """Runs in a worker."""
    value = AsyncAllReduce(
        torch.full((1,), float(rank + 1), device=f"cuda:{rank}"), dist.group.WORLD
    )
    return float(value.value())


def test_pending(simulated):
    assert simulated.run(2, pending) == [3.0, 3.0]


def _device():
    return sys.modules["simulated_device.on_torch"]
