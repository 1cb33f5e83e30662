"""What waits for what, one place of the package at a time, in as little as reaches it. `tools/planted_waits` takes each wait out in turn
and runs these: all but a few must fail then."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from plait.comm import measure
from plait.comm.algorithms import run, sum_over
from plait.comm.buckets import Flat
from plait.comm.compress import PowerSGDBuckets, QuantisedBuckets
from plait.comm.messages import Messenger
from plait.comm.pending import Pending
from plait.comm.waits import Waits
from plait.config.schema.sections import RunSection
from plait.data.loader import Loader
from plait.data.packing import Sequences
from plait.engine import device_rates, single_rank
from plait.events import Event, RunStarted, StepDone
from plait.parallel.activations.activation_store import DiskStore, HostStore
from plait.train.clock import StepClock
from plait.train.loop import Position, TrainingContext, train
from plait.train.stop import StopRequest
from tests.checkpoints import put
from tests.parity import cases, pipelines, tensor_parallel
from tests.parity.digests import digest
from tests.pool import Pool
from tests.simulated_device.pool import SimulatedPool
from tests.simulated_device.runs import config_of, in_stages, on_axes, resumed, steps_taken

CUDA = torch.device("cuda", 0)


# ---- stores of activations ----------------------------------------------------------------------------------------------------------


def host_store(rank: int, world: int) -> None:
    """Buffers are used again while the device is behind; a tensor may be asked for twice. Runs in a worker."""
    store = HostStore(CUDA)
    for length in (1000, 900, 1000):
        store.begin()
        groups, handles = [], []
        for block in range(3):
            group = store.open(block)
            made = [torch.arange(length * 4, device=CUDA).view(torch.uint8)[:length] + block + number for number in range(2)]
            before = _device().copies()
            handles.append([group.put(tensor) for tensor in made])
            assert _device().copies()["deferred"] - before["deferred"] == 2, "the program does not wait for the copies"
            groups.append(group)
            del made
        before = _device().copies()
        for block in (2, 1, 0):
            for number, handle in enumerate(handles[block]):
                found = groups[block].get(handle)
                assert torch.equal(found, torch.arange(length * 4, device=CUDA).view(torch.uint8)[:length] + block + number)
                del found
            assert torch.equal(groups[block].get(handles[block][0])[:4].cpu(), torch.arange(16).view(torch.uint8)[:4] + block)
        assert _device().copies()["deferred"] - before["deferred"] == 6, "prefetched without waiting"
        groups.clear()
        del group
    unused = store.open(0)
    unused.put(torch.ones(700, dtype=torch.uint8, device=CUDA))
    unused.prefetch()
    del unused  # its buffer is used again while the copy that nobody asked for may read it
    put = store.open(0)
    put.put(torch.zeros(700, dtype=torch.uint8, device=CUDA))
    put.put(torch.ones(64, dtype=torch.uint8, device=CUDA))
    store.drain()
    assert put._values[1].tolist() == [1] * 64
    del put
    held = _device().pinned_bytes()
    store.close()
    assert _device().pinned_bytes() < held


def disk_store(rank: int, world: int, folder: str) -> None:
    """Runs in a worker."""
    store, before = DiskStore(Path(folder), CUDA), _device().copies()
    group = store.open(0)
    handles = [group.put(torch.full((5000,), value, dtype=torch.uint8, device=CUDA)) for value in (1, 2)]
    assert _device().copies()["deferred"] - before["deferred"] == 2, "the program does not wait for the copies"
    store.drain()
    for value, handle in enumerate(handles, 1):
        assert bool((group.get(handle) == value).all())
    store.close()


def test_stores(simulated: SimulatedPool, tmp_path: Path) -> None:
    """Bit for bit."""
    simulated.run(1, host_store)
    simulated.run(1, disk_store, str(tmp_path))


# ---- collectives and messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "unused_parameters"), [("plain", True), ("llama", False)])
def test_reductions(simulated: SimulatedPool, kind: str, unused_parameters: bool) -> None:
    """Buckets of gradients, the norm, sums of weights. Where ranks ask each other who used what, that answer comes behind all buckets and
    orders them too."""
    config = on_axes(1, 2, 0, "plain", "on the device")
    config["parallel"]["unused_parameters"] = unused_parameters
    tensor_parallel.check(simulated, 2, kind, True, config)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["ring", "recursive-doubling", "reduce-scatter+all-gather"])
def test_composed_all_reduces(simulated: SimulatedPool, algorithm: str) -> None:
    """Their steps follow each other."""
    config = config_of(4 if algorithm == "recursive-doubling" else 2, 0, parallel={"all_reduce": algorithm})
    config["parallel"]["bucket_mib"] = 0.002
    world = config["parallel"]["dp_replicate"]
    tensor_parallel.check(simulated, world, "plain", True, {**config, "parallel": {"tp": 1, **config["parallel"]}})  # type: ignore[arg-type]


def composed(rank: int, world: int) -> tuple[list[float], float, list[float]]:
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


def test_composed_and_measured(simulated: SimulatedPool) -> None:
    """A time is taken when the device is done."""
    assert simulated.run(2, composed) == [([3.0] * 8, float(1 - rank), [3.0] * 8) for rank in range(2)]


class Watch:
    """In place of `time`: whether the device was behind whenever somebody looked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        self.behind: list[bool] = []
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self) -> float:
        self.behind.append(bool(_device().behind()))
        return float(len(self.behind))


def timed(rank: int, world: int) -> tuple[list[bool], list[bool]]:
    """The clock is looked at twice around every product, and around a step that is profiled. Runs in a worker."""
    torch.cuda.synchronize()
    with pytest.MonkeyPatch.context() as monkeypatch:
        watch = Watch(monkeypatch, device_rates, single_rank)
        device_rates.measure_products([(4, 4, 4)], dtype=torch.float32, device=CUDA)
        products, watch.behind = watch.behind, []
        x = torch.ones(4, device=CUDA)
        with single_rank._Profile(SimpleNamespace(device=CUDA)).step():  # type: ignore[arg-type]
            x.add_(1)
        return products, watch.behind


def test_times_are_taken_when_the_device_is_done(simulated: SimulatedPool) -> None:
    """And a step that is profiled begins when it is."""
    products, step = simulated.run(1, timed)[0]
    assert len(products) == 14 and not any(products[1::2])
    assert step == [False, False]


@pytest.mark.parametrize("way", ["int8", "powersgd", "sharded"])
def test_compressed(simulated: SimulatedPool, pool: Pool, way: str, tmp_path: Path) -> None:
    """As on the CPU."""
    config = config_of(2, 2 if way == "sharded" else 0, parallel={"compress_gradients": "int8" if way == "sharded" else way})
    device, cpu = (p.run(2, resumed, config, str(tmp_path / str(i)), torch.float32)[0][0] for i, p in enumerate((simulated, pool)))
    assert device.losses == pytest.approx(cpu.losses, rel=1e-3)


def in_buckets(rank: int, world: int, device: str) -> list[list[float]]:
    """Sums of four buckets, more than are on their first hop at once, in both compressions. Runs in a worker."""
    assert dist.group.WORLD is not None
    flats = [Flat(torch.float32, ((16, 16), (24, 16))) for _ in range(4)]
    at, found = torch.device(device, rank) if device == "cuda" else torch.device(device), []
    for buckets in (
        PowerSGDBuckets(dist.group.WORLD, flats, at, rank=2, whole_steps=1),
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


def test_compressed_buckets(simulated: SimulatedPool, pool: Pool) -> None:
    """As on the CPU; PowerSGD in its first step, which is not compressed, and behind it."""
    np.testing.assert_allclose(simulated.run(2, in_buckets, "cuda")[0], pool.run(2, in_buckets, "cpu")[0], rtol=1e-4, atol=1e-4)


def messages(rank: int, world: int) -> list[int]:
    """Runs in a worker."""
    groups = [dist.new_group(range(world)) for _ in range(2)]
    messenger = Messenger([(groups[0], groups[1])], device=torch.device("cuda", rank), waits=Waits())
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


def test_messages(simulated: SimulatedPool) -> None:
    """Between two stages: objects, tensors, and the end."""
    assert simulated.run(2, messages)[1] == [0, 0, 1, 1]
    pipelines.check(simulated, 2, "plain", True, in_stages("1f1b", 2, 1, 1, 0, "plain"))  # type: ignore[arg-type]


def test_overlapped_products(simulated: SimulatedPool) -> None:
    """Row-parallel products in pieces, gradients of inputs beside those of weights."""
    tensor_parallel.check(simulated, 2, "llama", True, on_axes(2, 1, 0, "plain", "on the device") | _overlap())  # type: ignore[arg-type]


def _overlap() -> dict[str, Any]:
    config = on_axes(2, 1, 0, "plain", "on the device")
    return {"parallel": {**config["parallel"], "tensor_overlap": 2}}


def pending(rank: int, world: int) -> float:
    """Runs in a worker."""
    value = Pending(torch.full((1,), float(rank + 1), device=f"cuda:{rank}"), dist.group.WORLD)
    return float(value.value())


def test_pending(simulated: SimulatedPool) -> None:
    assert simulated.run(2, pending) == [3.0, 3.0]


# ---- numbers that are read later ----------------------------------------------------------------------------------------------------


class Averaging(nn.Module):
    """A buffer that changes at every step, and one that begins to on rank 1 in the third."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("late", torch.zeros(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.average.mul_(0.5).add_(x.detach().mean(0))
        if self.calls > 2 and dist.get_rank() == 0:
            self.late.add_(1)
        return self.linear(x + self.average + self.late)


def averaged(rank: int, world: int) -> list[list[float]]:
    """Buffers after every step. Runs in a worker."""
    torch.manual_seed(2)
    loss = plait.per_sample(lambda output, batch: (output - batch[1]).pow(2).sum())
    config = config_of(world, 0, parallel={"unused_parameters": False})
    engine = plait.initialize(Averaging(), config | {"gradient_accumulation_steps": 1}, loss_fn=loss)
    found = []
    for step in range(6):
        x = torch.full((2, 3), float(step + rank))
        engine.train_batch([(x, x[:, :1])])
        found.append([float(value) for buffer in engine.model.buffers() for value in buffer[:1]])
    return found


def test_buffers(simulated: SimulatedPool, pool: Pool) -> None:
    """The first rank's, also where they begin to change late."""
    found = simulated.run(2, averaged)
    np.testing.assert_allclose(found, pool.run(2, averaged), rtol=1e-6)
    assert found[0][-1] == found[1][-1]
    assert found[0][-1][1] > 0


class Counted:
    """A user's loss."""

    def __init__(self, wrong: float) -> None:
        self.wrong = wrong

    def __call__(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total, weight = plait.causal_lm_loss(output, batch)
        return total, weight + self.wrong

    def weight(self, batch: Any) -> Any:
        return plait.causal_lm_loss.weight(batch)


def weighed(rank: int, world: int, wrong: float) -> str:
    """Runs in a worker."""
    engine = plait.initialize(cases.build("plain", tied=True), config_of(1, 0, parallel={}), loss_fn=Counted(wrong))
    before = _device().copies()["waited"]
    waited = []
    try:
        for step in cases.steps_for("plain", 2, steps=3):
            engine.train_batch(step)
            waited.append(_device().copies()["waited"] - before)
            before = _device().copies()["waited"]
    except plait.PlaitError as error:
        return str(error)
    assert waited[-1] == 0, "nothing waits for the device in a step"
    return ""


def test_weights_of_a_loss(simulated: SimulatedPool) -> None:
    """Compared a step later, without waiting in between."""
    assert simulated.run(1, weighed, 0.0) == [""]
    assert "the loss returned weights" in simulated.run(1, weighed, 1.0)[0]


# ---- seconds ------------------------------------------------------------------------------------------------------------------------


class Paced:
    """Steps of a second of the device's clock, validations of ten."""

    device, rank = CUDA, 0

    def __init__(self) -> None:
        self.now = 0.0

    def _take(self, seconds: float) -> None:
        self.now += seconds
        _device().set_clock(self.now)

    def train_batch(self, batch: Any) -> Any:
        self._take(1)
        numbers = {name: torch.ones((), device=CUDA) for name in ("loss", "weight", "grad_norm")}
        told = {"exposed_communication_seconds": {}, "decided": ""}
        return SimpleNamespace(**numbers, skipped=False, learning_rate=0.1, loss_scale=1.0, **told)

    def eval_batch(self, batch: Any) -> tuple[float, float]:
        self._take(10)
        return 6.0, 3.0

    def save_checkpoint(self, folder: Any, *, tag: Any = None, client_state: Any = None, wait: bool = True) -> Path:
        self._take(100)
        self.written = put(Path(folder), str(tag), client_state)
        return self.written

    def checkpoint_written(self, *, wait: bool = False) -> Path:
        return self.written


def paced(rank: int, world: int, folder: str) -> list[float]:
    """Seconds of every step, as in metrics.jsonl. Runs in a worker."""
    events: list[Event] = []
    sequences = Sequences(np.repeat(np.arange(10, dtype=np.uint16), 4), 4, padding=0)
    _device().set_clock(0.0)
    with StopRequest() as stop:
        job = TrainingContext(
            engine=Paced(),
            section=RunSection(steps=7, validate_every=2, checkpoint_every=3),
            loader=Loader(sequences, 2, seed=0),
            validation=lambda: iter([{}]),
            sample=None,
            checkpoints=Path(folder),
            client_state={},
            started=RunStarted(0, 7, 1, 10, "one process", folder),
            stop=stop,
            emit=events.append,
        )
        train(job, Position())
    _device().set_clock(-1)
    return [event.seconds for event in events if isinstance(event, StepDone)]


def test_seconds_of_a_step(simulated: SimulatedPool, tmp_path: Path) -> None:
    """Also of the first, and of those before a validation, a checkpoint and the end, whose numbers are read together."""
    assert simulated.run(1, paced, str(tmp_path)) == [pytest.approx([1.0] * 7)]


def clocked(rank: int, world: int) -> float:
    """Seconds of a step whose end is behind a copy. Runs in a worker."""
    _device().set_clock(1.0)
    clock = StepClock(CUDA)
    host, there = torch.zeros(4).pin_memory(), torch.ones(4, device=CUDA)
    host.copy_(there, non_blocking=True)
    ended = clock.mark()
    _device().set_clock(3.0)
    seconds = clock.seconds(ended)
    _device().set_clock(-1)
    return seconds


def test_the_end_of_a_step_is_waited_for(simulated: SimulatedPool) -> None:
    assert simulated.run(1, clocked) == [2.0]


# ---- checkpoints --------------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_beside_the_training(simulated: SimulatedPool, tmp_path: Path) -> None:
    """It has the numbers of its step, though the next has begun; the copies to the host do not wait for each other."""
    config = config_of(1, 0, parallel={})
    straight, again, _ = simulated.run(1, resumed, config, str(tmp_path), torch.float32, True)[0]
    assert digest(straight) == digest(again)


def test_batches_are_copied_from_pinned_memory(simulated: SimulatedPool) -> None:
    """They overlap with the step before."""
    found = simulated.run(1, steps_taken, config_of(1, 0, parallel={}), 2)[0]["copies"]
    assert found["pageable"] == 0
    assert found["deferred"] >= 2 * 3, "two micro-batches of three tensors"


def _device() -> Any:
    return sys.modules["simulated_device.on_torch"]
