"""The training loop: order of events, checkpoints, a clean stop, resuming, and errors in a step.

The engine is a fake without a model.
"""

import math
import os
import signal
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from plait.cluster.accelerator import HostCopy
from plait.config.schema.sections import RunSection
from plait.data.loader import Loader
from plait.data.packing import Sequences, Stream
from plait.errors import CommunicationError, NumbersError, PlaitError
from plait.events import CheckpointSaved, RunEnded, RunStarted, StepDone, Validated
from plait.train.loop import STOP_REQUESTED, Position, StopRequest, TrainingContext, train
from tests.checkpoints import put

CPU = torch.device("cpu")
BEGINNING = Position()


class FakeEngine:
    """An engine that records its batches and states. `before(step)` runs inside a step."""

    device = CPU
    rank = 0
    writing = None

    def __init__(self, **changes):
        self.batches = []
        self.states = []
        self.before = lambda step: None
        self.loss = lambda step: 1.0 / step
        self.decides = lambda step: ""
        self.skipped = False
        vars(self).update(changes)

    def train_batch(self, batch):
        self.batches.append(batch["input_ids"][:, 0].tolist())
        step = len(self.batches)
        self.before(step)
        return SimpleNamespace(
            loss=torch.tensor(self.loss(step)),
            weight=torch.tensor(6.0),
            grad_norm=torch.tensor(0.5),
            skipped=self.skipped,
            learning_rate=0.1,
            loss_scale=1.0,
            decided=self.decides(step),
        )

    def eval_batch(self, batch):
        return 6.0, 3.0

    def checkpoint_written(self, *, wait=False):
        path = self.writing
        self.writing = None
        return path

    def save_checkpoint(self, folder, *, tag=None, client_state=None, wait=True):
        self.states.append(dict(client_state))
        self.writing = put(Path(folder), str(tag), client_state, sequence=len(self.states))
        return self.writing


def run(folder, engine, *, start=BEGINNING, batches=2, rank=0, ranks=1, options=None, **section):
    """Run the loop with fields of the run's section. Return its signal and its events."""
    events = []
    stream = Stream(np.repeat(np.arange(10, dtype=np.uint16), 4), np.array([40]))
    sequences = Sequences(stream, 4, padding=0)
    with StopRequest() as stop:
        context = TrainingContext(
            engine=engine,
            section=RunSection(**section),
            loader=Loader(sequences, 2 * ranks, seed=0, dp_rank=rank, dp_size=ranks),
            validation=lambda: iter([{}] * batches),
            checkpoints=folder / "checkpoints",
            client_state={"identity": {"a": 1}},
            started=RunStarted(start.step, section["steps"], 1, 10, "one process", str(folder)),
            stop=stop,
            emit=events.append,
            **(options or {}),
        )
        return train(context, start), events


def signal_at(step, number):
    """Return a function that sends a signal in a step."""
    return lambda current: os.kill(os.getpid(), number) if current == step else None


def saved_folders(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def names(events):
    """Return `RunStarted-0 StepDone-1 ...`."""
    numbers = [e.first_step if isinstance(e, RunStarted) else e.step for e in events]
    return " ".join(f"{type(e).__name__}-{n}" for e, n in zip(events, numbers, strict=True))


def of_type(kind, events):
    return [event for event in events if isinstance(event, kind)]


def test_a_full_run_in_order(tmp_path):
    result, events = run(tmp_path, FakeEngine(), steps=5, validate_every=2, checkpoint_every=3)
    assert result == 0
    assert names(events) == (
        "RunStarted-0 StepDone-1 StepDone-2 Validated-2 StepDone-3 CheckpointSaved-3 StepDone-4 "
        "Validated-4 StepDone-5 Validated-5 CheckpointSaved-5 RunEnded-5"
    )
    step = of_type(StepDone, events)[0]
    assert (step.loss, step.weight, step.tokens, step.learning_rate) == (1.0, 6.0, 8, 0.1)
    assert of_type(Validated, events)[0].loss == 2.0


def test_a_decision_is_reported_after_its_step(tmp_path):
    engine = FakeEngine(decides=lambda step: "int8" if step == 2 else "")
    _, events = run(tmp_path, engine, steps=3)
    assert names(events[1:5]) == "StepDone-1 StepDone-2 CommunicationSelected-2 StepDone-3"


def test_actions_due_at_the_last_step_happen_once(tmp_path):
    _, events = run(tmp_path, FakeEngine(), steps=4, validate_every=2, checkpoint_every=2)
    assert names(events[-4:]) == "StepDone-4 Validated-4 CheckpointSaved-4 RunEnded-4"


def test_ranks_take_every_sequence_once(tmp_path):
    """A step takes the batches of all ranks, so no rank reads those of another in the next step."""
    engines = [FakeEngine(), FakeEngine()]
    for rank, engine in enumerate(engines):
        run(tmp_path / str(rank), engine, steps=2, rank=rank, ranks=2, checkpoint_every=2)
        assert engine.states[-1]["samples"] == 8
    sequences = list(chain(*engines[0].batches, *engines[1].batches))
    assert len(sequences) == len(set(sequences)) == 8


def test_without_validation_text_nothing_is_validated(tmp_path):
    _, events = run(tmp_path, FakeEngine(), batches=0, steps=2)
    assert not of_type(Validated, events)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        # The default is 30 minutes. A step takes 10, so the third makes a checkpoint due.
        ({}, [4, 8, 10]),
        ({"checkpoint_minutes": 50}, [6, 10]),
        ({"checkpoint_minutes": 0}, [10]),
        ({"checkpoint_every": 5}, [5, 10]),
        ({"checkpoint_every": 5, "checkpoint_minutes": 30}, [4, 5, 9, 10]),
    ],
)
def test_checkpoints_by_the_clock(tmp_path, section, expected):
    """A killed run with the default settings loses at most half an hour."""
    engine = FakeEngine()
    clock = {"seconds": lambda: 600.0 * len(engine.batches)}
    _, events = run(tmp_path, engine, options=clock, steps=10, **section)
    assert [event.step for event in of_type(CheckpointSaved, events)] == expected


def test_old_checkpoints_are_deleted(tmp_path):
    run(tmp_path, FakeEngine(), steps=5, checkpoint_every=1, keep=2)
    assert saved_folders(tmp_path) == ["step-00000004", "step-00000005"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path, number):
    handler = signal.getsignal(number)
    engine = FakeEngine(before=signal_at(2, number))
    result, events = run(tmp_path, engine, steps=9)
    assert result == number
    assert names(events[-3:]) == "StepDone-2 CheckpointSaved-2 RunEnded-2"
    assert events[-1].reason == "interrupted"
    assert engine.states == [{"identity": {"a": 1}, "step": 2, "samples": 4, "loader": {}}]
    assert signal.getsignal(number) is handler


def test_a_signal_in_the_last_step_changes_nothing(tmp_path):
    engine = FakeEngine(before=signal_at(2, signal.SIGTERM))
    result, events = run(tmp_path, engine, steps=2)
    assert result == 0
    assert isinstance(events[-1], RunEnded) and events[-1].reason == "finished"


def test_a_second_interrupt_does_not_wait_for_the_step(tmp_path):
    def interrupt_twice(step):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, FakeEngine(before=interrupt_twice), steps=9)


def test_a_resumed_run_reads_the_batches_of_an_uninterrupted_one(tmp_path):
    uninterrupted = FakeEngine()
    run(tmp_path / "uninterrupted", uninterrupted, steps=8)
    first = FakeEngine(before=signal_at(3, signal.SIGTERM))
    run(tmp_path / "resumed", first, steps=8)
    position = Position(first.states[-1]["step"], first.states[-1]["samples"])
    second = FakeEngine()
    _, events = run(tmp_path / "resumed", second, start=position, steps=8)
    assert first.batches + second.batches == uninterrupted.batches
    assert names(events[:2]) == "RunStarted-3 StepDone-4"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_non_finite_loss_ends_the_run_and_keeps_checkpoints(tmp_path, loss):
    engine = FakeEngine(loss=lambda step: loss if step == 3 else 1.0)
    with pytest.raises(PlaitError, match=rf"step 3: loss = {loss}"):
        run(tmp_path, engine, steps=9, checkpoint_every=1, keep=1)
    assert saved_folders(tmp_path) == ["step-00000002"]


def test_the_batch_of_a_non_finite_step_can_be_left_out(tmp_path):
    def fail(step):
        if step == 3:
            raise NumbersError("not finite")

    with pytest.raises(NumbersError) as error:
        run(tmp_path, FakeEngine(before=fail), steps=5)
    assert error.value.samples is not None
    reference = FakeEngine()
    run(tmp_path, reference, steps=5)
    repeated = FakeEngine()
    run(tmp_path, repeated, steps=4, options={"left_out": {error.value.samples}})
    assert repeated.batches == [*reference.batches[:2], *reference.batches[3:]]


def test_a_skipped_step_may_overflow(tmp_path):
    engine = FakeEngine(loss=lambda step: math.inf, skipped=True)
    result, events = run(tmp_path, engine, steps=2)
    assert result == 0
    for event in of_type(StepDone, events):
        assert event.skipped


def test_on_a_gpu_results_are_read_one_step_late(tmp_path, monkeypatch):
    """The engine only names a device other than the CPU, and the test records the reads."""
    reads = []
    engine = FakeEngine(loss=float, device=torch.device("meta"))

    class RecordedCopy(HostCopy):
        def values(self):
            numbers = super().values()
            reads.append((int(numbers[0]), len(engine.batches)))
            return numbers

    def shared(self, device, is_due):
        return torch.tensor([float(self.number)])

    # Tensors on meta have no values to copy or to share.
    monkeypatch.setattr("plait.train.loop.HostCopy", RecordedCopy)
    monkeypatch.setattr(StopRequest, "shared", shared)
    monkeypatch.setattr("plait.train.loop.peak_memory_bytes", lambda device: 0)
    _, events = run(tmp_path, engine, steps=5, checkpoint_every=3)
    # A checkpoint and the end wait for all results.
    assert reads == [(1, 2), (2, 3), (3, 3), (4, 5), (5, 5)]
    assert [event.step for event in of_type(StepDone, events)] == [1, 2, 3, 4, 5]
    assert len(of_type(CheckpointSaved, events)) == 2


def test_requests_of_one_process():
    notes = []
    stop = StopRequest(on_request=lambda: notes.append(1))
    assert float(stop.shared(device=CPU)) == 0
    # A fraction says that a checkpoint is due. A run that stops writes one anyway.
    assert float(stop.shared(device=CPU, is_due=True)) == 0.5
    stop._handle(signal.SIGINT, None)
    assert notes == [1], "the user must be notified at once"
    assert float(stop.shared(device=CPU)) == signal.SIGINT
    stop = StopRequest()
    stop.ask()
    assert int(stop.shared(device=CPU, is_due=True)) == STOP_REQUESTED


def test_a_lost_connection_names_the_phase_and_the_rank(monkeypatch):
    """Otherwise gloo's error would be the full message, with exit code 1."""

    def lose(*_, **__):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    # A group of two ranks whose other rank has ended, without the processes.
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", lose)
    with pytest.raises(CommunicationError, match="requests to stop: rank 0 lost the connection"):
        StopRequest().shared(device=CPU)
