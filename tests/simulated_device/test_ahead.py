"""The program runs ahead of the device: numbers that are read later, times, checkpoints beside the training, batches. Like `test_waits`,
one place of the package at a time."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from plait.checkpoint.save import Writer
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.config.schema.sections import RunSection
from plait.data.loader import Loader
from plait.data.packing import Sequences, Stream
from plait.errors import CheckpointError
from plait.events import Event, RunStarted, StepDone
from plait.observe.metrics import MetricsFile, read_metrics
from plait.parallel.micro_batches import to_device
from plait.train.loop import Position, StepClock, StopRequest, TrainingContext, train
from plait.verify.parity import compare, worst
from tests.checkpoints import put
from tests.parity import cases
from tests.parity.digests import digest
from tests.simulated_device.runs import config_of, resumed, steps_taken

CUDA = torch.device("cuda", 0)


class Averaging(nn.Module):
    """A buffer that changes at every step, and one that begins to on rank 1 in the third."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("late", torch.zeros(3))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.average.mul_(0.5).add_(x.detach().mean(0))
        if self.calls > 2 and dist.get_rank() == 0:
            self.late.add_(1)
        return self.linear(x + self.average + self.late)


def averaged(rank, world):
    """Buffers after every step, which the host reads at the end. Runs in a worker."""
    torch.manual_seed(2)
    loss = plait.per_sample(lambda output, batch: (output - batch[1]).pow(2).sum())
    config = config_of(world, 0, parallel={"unused_parameters": False})
    engine = plait.initialize(
        Averaging(), config | {"gradient_accumulation_steps": 1}, loss_fn=loss
    )
    found, waited = [], []
    for step in range(6):
        x = torch.full((2, 3), float(step + rank))
        before = _device().copies()["waited"] if engine.device.type != "cpu" else 0
        engine.train_batch([(x, x[:, :1])])
        waited.append(_device().copies()["waited"] - before if engine.device.type != "cpu" else 0)
        found.append([buffer[:1].clone() for buffer in engine.model.buffers()])
    assert waited[1:3] == [0, 0], (
        f"the answer whether any rank saw a buffer change is not waited for: {waited}"
    )
    return [[float(buffer) for buffer in step] for step in found]


def test_buffers(simulated, pool):
    """The first rank's, also where they begin to change late."""
    found = simulated.run(2, averaged)
    np.testing.assert_allclose(found, pool.run(2, averaged), rtol=1e-6)
    assert found[0][-1] == found[1][-1]
    assert found[0][-1][1] > 0


class Counted:
    """A user's loss."""

    def __init__(self, wrong):
        self.wrong = wrong

    def __call__(self, output, batch):
        total, weight = plait.causal_lm_loss(output, batch)
        return total, weight + self.wrong

    def weight(self, batch):
        return plait.causal_lm_loss.weight(batch)


def weighed(rank, world, wrong):
    """Runs in a worker."""
    engine = plait.initialize(
        cases.build("plain", tied=True), config_of(1, 0, parallel={}), loss_fn=Counted(wrong)
    )
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


def test_weights_of_a_loss(simulated):
    """Compared a step later, without waiting in between."""
    assert simulated.run(1, weighed, 0.0) == [""]
    assert "the loss returned weights" in simulated.run(1, weighed, 1.0)[0]


class Paced:
    """Steps of a second of the device's clock, validations of ten."""

    device, rank = CUDA, 0

    def __init__(self):
        self.now = 0.0

    def _take(self, seconds):
        self.now += seconds
        _device().set_clock(self.now)

    def train_batch(self, batch):
        self._take(1)
        numbers = {name: torch.ones((), device=CUDA) for name in ("loss", "weight", "grad_norm")}
        return SimpleNamespace(
            **numbers, skipped=False, learning_rate=0.1, loss_scale=1.0, decided=""
        )

    def eval_batch(self, batch):
        self._take(10)
        return 6.0, 3.0

    def save_checkpoint(self, folder, *, tag=None, client_state=None, wait=True):
        self._take(100)
        self.written = put(Path(folder), str(tag), client_state)
        return self.written

    def checkpoint_written(self, *, wait=False):
        return self.written


def paced(rank, world, folder):
    """Seconds of every step, as in metrics.jsonl. Runs in a worker."""
    events: list[Event] = []
    sequences = Sequences(
        Stream(np.repeat(np.arange(10, dtype=np.uint16), 4), np.array([40])), 4, padding=0
    )
    _device().set_clock(0.0)
    with StopRequest() as stop:
        job = TrainingContext(
            engine=Paced(),
            section=RunSection(steps=7, validate_every=2, checkpoint_every=3),
            loader=Loader(sequences, 2, seed=0),
            validation=lambda: iter([{}]),
            checkpoints=Path(folder),
            client_state={},
            started=RunStarted(0, 7, 1, 10, "one process", folder),
            stop=stop,
            emit=events.append,
        )
        train(job, Position())
    _device().set_clock(-1)
    return [event.seconds for event in events if isinstance(event, StepDone)]


def test_seconds_of_a_step(simulated, tmp_path):
    """Also of the first, and of those before a validation, a checkpoint and the end, whose numbers are read together."""
    assert simulated.run(1, paced, str(tmp_path)) == [pytest.approx([1.0] * 7)]


def clocked(rank, world):
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


def test_the_end_of_a_step_is_waited_for(simulated):
    assert simulated.run(1, clocked) == [2.0]


def staged(rank, world):
    """What the thread that writes is given. Runs in a worker."""
    tensors = {"x": torch.arange(4.0, device=CUDA)}
    found = Writer(SimpleNamespace(device=CUDA))._stage(SimpleNamespace(tensors=tensors))  # type: ignore[arg-type]
    return found["x"].tolist()


def test_what_is_staged_has_arrived(simulated):
    assert simulated.run(1, staged) == [[0.0, 1.0, 2.0, 3.0]]


def test_a_checkpoint_beside_the_training(simulated, row, tmp_path):
    """It has the numbers of its step, though the next has begun; the copies to the host do not wait for each other."""
    straight, again, _ = simulated.run(
        2, resumed, config_of(2, 1, parallel={}), str(tmp_path), torch.float32, True
    )[0]
    assert digest(straight) == digest(again)
    row(
        "dp 2, ZeRO 1, checkpoint beside the training",
        "without a resume",
        worst(compare(straight, again)).error,
    )


def test_batches_are_copied_from_pinned_memory(simulated):
    """They overlap with the step before."""
    found = simulated.run(1, steps_taken, config_of(1, 0, parallel={}), 2)[0]["copies"]
    assert found["pageable"] == 0
    assert found["deferred"] >= 2 * 3, "two micro-batches of three tensors"


def expanded(rank, world):
    """Whether an expanded batch arrives. Runs in a worker."""
    positions = torch.arange(5).expand(3, 5)
    return bool((to_device(positions, CUDA).cpu() == positions).all())


def test_an_expanded_batch_arrives(simulated):
    """Position ids are often expanded; such a tensor cannot be pinned as it is."""
    assert simulated.run(1, expanded) == [True]


def waiting(rank, world, config):
    """How often the host waited in four steps of a loss whose weight is a number, beside the writing of a checkpoint, and in asking
    whether to stop. Runs in a worker."""
    loss = plait.per_sample(lambda output, batch: output.logits.float().mean((1, 2)).sum())
    engine = plait.initialize(cases.build("llama", tied=True), config, loss_fn=loss)
    engine._writer._unsettled = Future()
    micro, waited = config["gradient_accumulation_steps"], []
    # Transformers reads a mask that it is given, to see whether it hides anything.
    for step in cases.ragged_steps(engine.dp_size * micro, steps=4, keys=()):
        before = _device().blocked()["drained"]
        engine.train_batch(list(step[engine.dp_rank * micro : (engine.dp_rank + 1) * micro]))
        waited.append(_device().blocked()["drained"] - before)
    engine._writer._unsettled = None
    before = _device().blocked()["all"]
    with StopRequest() as stop:
        stop.shared(device=engine.device)
    return waited, _device().blocked()["all"] - before


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_waits_for_nothing(simulated, stage):
    """The program runs ahead of the device; a number that is copied from memory that is not pinned would stop it."""
    for steps, asked in simulated.run(2, waiting, config_of(2, stage, parallel={})):
        assert steps[1:] == [0, 0, 0] and asked == 0, (steps, asked)


def ahead(rank, world, config, folder):
    """Run `plait train`'s loop with a metrics file over a model of Transformers. Runs in a worker.

    Returns:
        By step, how often the program has waited for the device, and how often so that the device
        had no work left; and the losses that the metrics file has.
    """
    model = cases.build("llama", tied=True, dtype=torch.float32)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    sequences = Sequences(
        Stream(np.arange(100, dtype=np.uint16).repeat(8), np.array([800])), 8, padding=0
    )
    metrics = MetricsFile(Path(folder) / f"metrics-{rank}.jsonl")
    blocked: list[dict[str, int]] = []

    def emit(event):
        metrics(event)
        if isinstance(event, StepDone):
            blocked.append(_device().blocked())

    with StopRequest() as stop:
        job = TrainingContext(
            engine=engine,
            section=RunSection(steps=8, validate_every=0, checkpoint_every=0),
            loader=Loader(sequences, 4, seed=0, dp_rank=engine.dp_rank, dp_size=engine.dp_size),
            validation=lambda: iter([]),
            checkpoints=Path(folder),
            client_state={},
            started=RunStarted(0, 8, world, 10, "two processes", folder),
            stop=stop,
            emit=emit,
        )
        train(job, Position())
    waits, idle = (
        [after[kind] - before[kind] for before, after in pairwise(blocked)]
        for kind in ("all", "drained")
    )
    losses = [
        row["loss"]
        for row in read_metrics(Path(folder) / f"metrics-{rank}.jsonl")
        if row["event"] == "step"
    ]
    return waits, idle, losses


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_with_metrics_never_lets_the_device_idle(simulated, stage, tmp_path):
    """The numbers of a step are read while the next one is queued, and nothing else is waited for."""
    config = config_of(2, stage, parallel={}) | {"gradient_accumulation_steps": 1}
    for waits, idle, losses in simulated.run(2, ahead, config, str(tmp_path)):
        # The first steps measure and allocate. The numbers of the last two are read together, at the end.
        assert idle[2:6] == [0, 0, 0, 0], (waits, idle)
        assert max(waits[2:6]) <= 2, f"for the numbers and for the end of the step before: {waits}"
        assert len(losses) == 8 and losses[-1] < losses[0]


def meshes(rank, world):
    """Sums over the axes of a mesh that is made where two of four ranks are in one group more. Runs in a worker."""
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    mesh = build_mesh(Layout(cp=2, tp=2), host_tensors=True)
    found = []
    for device in ("cpu", "cuda"):
        for axis in ("cp", "tp"):
            tensor = torch.full((1,), float(rank), device=device)
            dist.all_reduce(tensor, group=mesh.group(axis))
            found.append(float(tensor))
    return found


def test_ranks_of_unequally_many_groups_make_a_mesh(simulated):
    """gloo's half of a group that is split from the default one is found by its name."""
    assert simulated.run(4, meshes) == [[2, 1, 2, 1], [4, 1, 4, 1], [2, 5, 2, 5], [4, 5, 4, 5]]


def failed(rank, world):
    """What is raised in three calls on a rank, after rank 1's write has failed. Runs in a worker."""
    writer, told = Writer(build_mesh(Layout(dp_replicate=world))), []
    writer._unsettled = written = Future()
    if rank == 1:
        written.set_exception(CheckpointError("no space"))
    for _ in range(3):
        try:
            writer.raise_failed()
            told.append("")
        except CheckpointError as error:
            told.append(str(error))
        if rank == 0 and not written.done():
            written.set_exception(CheckpointError("rank 1 has no space"))
    return told


def test_a_failed_write_is_told_on_all_ranks_a_step_later(simulated):
    """Where the answer would be waited for otherwise."""
    assert simulated.run(2, failed) == [["", "rank 1 has no space", ""], ["", "no space", ""]]


def _device():
    return sys.modules["simulated_device.on_torch"]
