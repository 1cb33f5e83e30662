"""The program runs ahead of the device, which asynchronous reads, times and checkpoints respect.

Each test reaches one place of the package.
"""

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
from tests.simulated_device.runs import config_of, micro_batches_of, resumed, steps_taken

CUDA = torch.device("cuda", 0)


class Averaging(nn.Module):
    """A model with a buffer that changes in every step, and one that rank 0 changes from step 2."""

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
    """Return the buffers after every step, which are read at the end. Runs on every rank."""
    torch.manual_seed(2)
    loss = plait.per_sample(lambda output, batch: (output - batch[1]).pow(2).sum())
    config = config_of(world, 0, parallel={"unused_parameters": False})
    config["gradient_accumulation_steps"] = 1
    engine = plait.initialize(Averaging(), config, loss_fn=loss)
    on_device = engine.device.type != "cpu"
    buffers = []
    waited = []
    for step in range(6):
        x = torch.full((2, 3), float(step + rank))
        before = _device().copies()["waited"] if on_device else 0
        engine.train_batch([(x, x[:, :1])])
        if on_device:
            waited.append(_device().copies()["waited"] - before)
        buffers.append([buffer[:1].clone() for buffer in engine.model.buffers()])
    # Ranks ask each other whether a buffer changed, and read the answer later.
    assert waited[1:3] == ([0, 0] if on_device else [])
    return [[float(buffer) for buffer in step] for step in buffers]


def test_buffers(simulated, pool):
    """All ranks have the buffers of the first, even if they change after some steps."""
    actual = simulated.run(2, averaged)
    np.testing.assert_allclose(actual, pool.run(2, averaged), rtol=1e-6)
    assert actual[0][-1] == actual[1][-1]
    assert actual[0][-1][1] > 0


class Counted:
    """A loss whose weight differs from `weight` by an error."""

    def __init__(self, wrong):
        self.wrong = wrong

    def __call__(self, output, batch):
        total, weight = plait.causal_lm_loss(output, batch)
        return total, weight + self.wrong

    def weight(self, batch):
        return plait.causal_lm_loss.weight(batch)


def weighed(rank, world, wrong):
    """Runs on every rank."""
    model = cases.build("plain", tied=True)
    engine = plait.initialize(model, config_of(1, 0, parallel={}), loss_fn=Counted(wrong))
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
    """They are compared a step later, without a wait in between."""
    assert simulated.run(1, weighed, 0.0) == [""]
    assert "the loss returned weights" in simulated.run(1, weighed, 1.0)[0]


class Paced:
    """An engine whose steps take a second of the device's clock, and whose validations take ten."""

    device = CUDA
    rank = 0

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
    """Return the seconds of every step, as in metrics.jsonl. Runs on every rank."""
    events: list[Event] = []
    _device().set_clock(0.0)
    run_loop(
        Paced(),
        folder,
        section=RunSection(steps=7, validate_every=2, checkpoint_every=3),
        loader=Loader(sequences_of(10, repeats=4), 2, seed=0),
        validation=lambda: iter([{}]),
        emit=events.append,
    )
    _device().set_clock(-1)
    return [event.seconds for event in events if isinstance(event, StepDone)]


def sequences_of(count, *, repeats):
    """Return sequences of `repeats` equal tokens."""
    tokens = np.repeat(np.arange(count, dtype=np.uint16), repeats)
    return Sequences(Stream(tokens, np.array([len(tokens)])), repeats, padding=0)


def run_loop(engine, folder, *, section, **fields):
    """Run the loop of `plait train`."""
    started = RunStarted(0, section.steps, dist.get_world_size(), 10, "processes", folder)
    with StopRequest() as stop:
        context = TrainingContext(
            engine=engine,
            section=section,
            checkpoints=Path(folder),
            client_state={},
            started=started,
            stop=stop,
            **fields,
        )
        train(context, Position())


def test_seconds_of_a_step(simulated, tmp_path):
    """Numbers of steps before a validation, a checkpoint and the end are read together."""
    assert simulated.run(1, paced, str(tmp_path)) == [pytest.approx([1.0] * 7)]


def clocked(rank, world):
    """Return the seconds of a step whose end is queued behind a copy. Runs on every rank."""
    _device().set_clock(1.0)
    clock = StepClock(CUDA)
    host = torch.zeros(4).pin_memory()
    x = torch.ones(4, device=CUDA)  # has a name, because freeing it would end the copy
    host.copy_(x, non_blocking=True)
    ended = clock.mark()
    _device().set_clock(3.0)
    seconds = clock.seconds(ended)
    _device().set_clock(-1)
    return seconds


def test_the_end_of_a_step_is_waited_for(simulated):
    assert simulated.run(1, clocked) == [2.0]


def staged(rank, world):
    """Return a tensor as the thread that writes gets it. Runs on every rank."""
    snapshot = SimpleNamespace(tensors={"x": torch.arange(4.0, device=CUDA)})
    # The copy is internal, and in a complete save another wait would hide a missing one.
    copies = Writer(SimpleNamespace(device=CUDA))._stage(snapshot)
    return copies["x"].tolist()


def test_what_is_staged_has_arrived(simulated):
    assert simulated.run(1, staged) == [[0.0, 1.0, 2.0, 3.0]]


def test_asynchronous_checkpoint_has_the_values_of_its_step(simulated, row, tmp_path):
    """The copies to the host do not wait for each other."""
    arguments = (config_of(2, 1, parallel={}), str(tmp_path), torch.float32, True)
    straight, again, _ = simulated.run(2, resumed, *arguments)[0]
    assert digest(straight) == digest(again)
    error = worst(compare(straight, again)).error
    row("dp 2, ZeRO 1, checkpoint beside the training", "without a resume", error)


def test_batches_are_copied_from_pinned_memory(simulated):
    """The copies overlap with the previous step."""
    copies = simulated.run(1, steps_taken, config_of(1, 0, parallel={}), 2)[0]["copies"]
    assert copies["pageable"] == 0
    assert copies["deferred"] >= 2 * 3, "two micro-batches of three tensors"


def expanded(rank, world):
    """Return whether an expanded batch is copied. Runs on every rank."""
    positions = torch.arange(5).expand(3, 5)
    return bool((to_device(positions, CUDA).cpu() == positions).all())


def test_expanded_batch_is_copied(simulated):
    """Position ids are often expanded, and such a tensor cannot be pinned."""
    assert simulated.run(1, expanded) == [True]


def waiting(rank, world, config):
    """Count the waits of the host. Runs on every rank.

    Returns:
        The waits in each of four steps while a checkpoint is written, and those in asking whether
        to stop.
    """
    loss = plait.per_sample(lambda output, batch: output.logits.float().mean((1, 2)).sum())
    engine = plait.initialize(cases.build("llama", tied=True), config, loss_fn=loss)
    engine._writer._unsettled = Future()  # a write that does not end during the steps
    waited = []
    micro_batches = engine.dp_size * config["gradient_accumulation_steps"]
    # Without masks, because Transformers reads them to see whether they hide anything.
    for step in cases.ragged_steps(micro_batches, steps=4, keys=()):
        before = _device().blocked()["drained"]
        engine.train_batch(micro_batches_of(engine, step))
        waited.append(_device().blocked()["drained"] - before)
    engine._writer._unsettled = None
    before = _device().blocked()["all"]
    with StopRequest() as stop:
        stop.shared(device=engine.device)
    return waited, _device().blocked()["all"] - before


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_step_waits_for_nothing(simulated, stage):
    """A copy from memory that is not pinned would stop the program."""
    for steps, stop_waits in simulated.run(2, waiting, config_of(2, stage, parallel={})):
        assert steps[1:] == [0, 0, 0] and stop_waits == 0, (steps, stop_waits)


def ahead(rank, world, config, folder):
    """Run the loop of `plait train` with a metrics file and a Llama. Runs on every rank.

    Returns:
        By step, how often the program has waited for the device, and how often so that the device
        had no work left; and the losses that the metrics file has.
    """
    model = cases.build("llama", tied=True, dtype=torch.float32)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    metrics = MetricsFile(Path(folder) / f"metrics-{rank}.jsonl")
    blocked: list[dict[str, int]] = []

    def emit(event):
        metrics(event)
        if isinstance(event, StepDone):
            blocked.append(_device().blocked())

    sequences = sequences_of(100, repeats=8)
    run_loop(
        engine,
        folder,
        section=RunSection(steps=8, validate_every=0, checkpoint_every=0),
        loader=Loader(sequences, 4, seed=0, dp_rank=engine.dp_rank, dp_size=engine.dp_size),
        validation=lambda: iter([]),
        emit=emit,
    )
    steps = list(pairwise(blocked))
    waits = [after["all"] - before["all"] for before, after in steps]
    idle = [after["drained"] - before["drained"] for before, after in steps]
    rows = read_metrics(Path(folder) / f"metrics-{rank}.jsonl")
    return waits, idle, [row["loss"] for row in rows if row["event"] == "step"]


@pytest.mark.parametrize("stage", [0, 3])
def test_run_with_metrics_never_lets_the_device_idle(simulated, stage, tmp_path):
    """The numbers of a step are read while the next one is queued."""
    config = config_of(2, stage, parallel={}) | {"gradient_accumulation_steps": 1}
    for waits, idle, losses in simulated.run(2, ahead, config, str(tmp_path)):
        # The first steps measure and allocate. The numbers of the last two are read together.
        assert idle[2:6] == [0, 0, 0, 0], (waits, idle)
        assert max(waits[2:6]) <= 2, f"for the numbers and for the end of the step before: {waits}"
        assert len(losses) == 8 and losses[-1] < losses[0]


def meshes(rank, world):
    """Return sums over the axes of a mesh, two of whose ranks have a group more.

    Runs on every rank.
    """
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    mesh = build_mesh(Layout(cp=2, tp=2), host_tensors=True)
    sums = []
    for device in ("cpu", "cuda"):
        for axis in ("cp", "tp"):
            tensor = torch.full((1,), float(rank), device=device)
            dist.all_reduce(tensor, group=mesh.group(axis))
            sums.append(float(tensor))
    return sums


def test_ranks_of_unequally_many_groups_make_a_mesh(simulated):
    """The name of a group that is split from the default one leads to its gloo half."""
    assert simulated.run(4, meshes) == [[2, 1, 2, 1], [4, 1, 4, 1], [2, 5, 2, 5], [4, 5, 4, 5]]


def failed(rank, world):
    """Return the errors of three steps after a failed write of rank 1. Runs on every rank."""
    writer = Writer(build_mesh(Layout(dp_replicate=world)))
    messages = []
    writer._unsettled = written = Future()  # in place of a thread, whose time would be random
    if rank == 1:
        written.set_exception(CheckpointError("no space"))
    for _ in range(3):
        try:
            writer.raise_failed()
            messages.append("")
        except CheckpointError as error:
            messages.append(str(error))
        if rank == 0 and not written.done():
            written.set_exception(CheckpointError("rank 1 has no space"))
    return messages


def test_failed_write_is_raised_on_all_ranks_a_step_later(simulated):
    """The program would have to wait for the device to raise it at once."""
    assert simulated.run(2, failed) == [["", "rank 1 has no space", ""], ["", "no space", ""]]


def _device():
    return sys.modules["simulated_device.on_torch"]
