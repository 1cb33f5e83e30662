"""The order of events in a run, its cadence, a clean stop, resuming, and what happens when the loss is lost. No model: a made-up engine."""

import math
import os
import signal
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

BEGINNING = Position()


class FakeEngine:
    """Engine that records its batches and states. `before(step)` runs inside a step."""

    device, rank, writing = torch.device("cpu"), 0, None

    def __init__(self, **changes):
        self.batches, self.states = [], []
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
        path, self.writing = self.writing, None
        return path

    def save_checkpoint(self, folder, *, tag=None, client_state=None, wait=True):
        self.states.append(dict(client_state))
        self.writing = put(Path(folder), str(tag), client_state, sequence=len(self.states))
        return self.writing


def _run(
    folder, engine, *, start=BEGINNING, batches=2, ranks=(0, 1), left_out=(), seconds=None, **section
):  # fmt: skip
    events = []
    stream = Stream(np.repeat(np.arange(10, dtype=np.uint16), 4), np.array([40]))
    rank, size = ranks
    sequences = Sequences(stream, 4, padding=0)
    with StopRequest() as stop:
        job = TrainingContext(
            engine=engine,
            section=RunSection(**section),
            loader=Loader(sequences, 2 * size, seed=0, dp_rank=rank, dp_size=size),
            validation=lambda: iter([{}] * batches),
            checkpoints=folder / "checkpoints",
            client_state={"identity": {"a": 1}},
            started=RunStarted(start.step, section["steps"], 1, 10, "one process", str(folder)),
            stop=stop,
            emit=events.append,
            left_out=left_out,
            **({} if seconds is None else {"seconds": seconds}),
        )
        return train(job, start), events


def _at_step(step, number):
    """Send a signal in this step."""
    return lambda at: os.kill(os.getpid(), number) if at == step else None


def _saved(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def _told(events):
    return " ".join(
        f"{type(event).__name__}-{event.first_step if isinstance(event, RunStarted) else event.step}"
        for event in events
    )


def test_a_whole_run_in_order(tmp_path):
    ended, events = _run(tmp_path, FakeEngine(), steps=5, validate_every=2, checkpoint_every=3)
    assert ended == 0
    assert _told(events) == (
        "RunStarted-0 StepDone-1 StepDone-2 Validated-2 StepDone-3 CheckpointSaved-3 StepDone-4 "
        "Validated-4 StepDone-5 Validated-5 CheckpointSaved-5 RunEnded-5"
    )
    step = next(event for event in events if isinstance(event, StepDone))
    assert (step.loss, step.weight, step.tokens, step.learning_rate) == (1.0, 6.0, 8, 0.1)
    assert next(event for event in events if isinstance(event, Validated)).loss == 2.0


def test_a_decision_is_reported_after_its_step(tmp_path):
    engine = FakeEngine(decides=lambda step: "int8" if step == 2 else "")
    _, events = _run(tmp_path, engine, steps=3)
    assert _told(events[1:5]) == "StepDone-1 StepDone-2 CommunicationSelected-2 StepDone-3"


def test_what_fell_due_at_the_last_step_is_done_once(tmp_path):
    _, events = _run(tmp_path, FakeEngine(), steps=4, validate_every=2, checkpoint_every=2)
    assert _told(events[-4:]) == "StepDone-4 Validated-4 CheckpointSaved-4 RunEnded-4"


def test_ranks_take_every_sequence_once(tmp_path):
    """A step takes the batch of all ranks: no rank sees what another had in the step before."""
    engines = [FakeEngine(), FakeEngine()]
    for rank, engine in enumerate(engines):
        _run(tmp_path / str(rank), engine, steps=2, ranks=(rank, 2), checkpoint_every=2)
        assert engine.states[-1]["samples"] == 8
    taken = [first for engine in engines for batch in engine.batches for first in batch]
    assert len(taken) == len(set(taken)) == 8


def test_no_validation_text_means_no_validation(tmp_path):
    _, events = _run(tmp_path, FakeEngine(), batches=0, steps=2)
    assert not any(isinstance(event, Validated) for event in events)


@pytest.mark.parametrize(
    ("section", "saved"),
    [
        # By default every 30 minutes. A step takes 10, so the third makes it due and the fourth writes.
        ({}, [4, 8, 10]),
        ({"checkpoint_minutes": 50}, [6, 10]),
        ({"checkpoint_minutes": 0}, [10]),
        ({"checkpoint_every": 5}, [5, 10]),
        ({"checkpoint_every": 5, "checkpoint_minutes": 30}, [4, 5, 9, 10]),
    ],
)
def test_checkpoints_by_the_clock(tmp_path, section, saved):
    """A killed run with the default settings loses at most half an hour."""
    now = [0.0]

    def pass_time(step):
        now[0] += 600

    engine = FakeEngine(before=pass_time)
    _, events = _run(tmp_path, engine, seconds=lambda: now[0], steps=10, **section)
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == saved


def test_old_checkpoints_go(tmp_path):
    _run(tmp_path, FakeEngine(), steps=5, checkpoint_every=1, keep=2)
    assert _saved(tmp_path) == ["step-00000004", "step-00000005"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_after_the_step_with_a_checkpoint(tmp_path, number):
    engine = FakeEngine(before=_at_step(2, number))
    ended, events = _run(tmp_path, engine, steps=9)
    assert ended == number
    assert _told(events[-3:]) == "StepDone-2 CheckpointSaved-2 RunEnded-2"
    assert events[-1].reason == "interrupted"
    assert engine.states == [{"identity": {"a": 1}, "step": 2, "samples": 4, "loader": {}}]


def test_a_signal_in_the_last_step_does_not_spoil_the_end(tmp_path):
    engine = FakeEngine(before=_at_step(2, signal.SIGTERM))
    ended, events = _run(tmp_path, engine, steps=2)
    assert ended == 0
    assert isinstance(events[-1], RunEnded) and events[-1].reason == "finished"


def test_a_second_interrupt_does_not_wait(tmp_path):
    def twice(step):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path, FakeEngine(before=twice), steps=9)


def test_handlers_are_given_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    _run(tmp_path, FakeEngine(), steps=1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_resumed_run_sees_what_an_uninterrupted_one_sees(tmp_path):
    uninterrupted, second = FakeEngine(), FakeEngine()
    first = FakeEngine(before=_at_step(3, signal.SIGTERM))
    _run(tmp_path / "uninterrupted", uninterrupted, steps=8)
    _run(tmp_path / "parts", first, steps=8)
    position = Position(first.states[-1]["step"], first.states[-1]["samples"])
    _, events = _run(tmp_path / "parts", second, start=position, steps=8)
    assert first.batches + second.batches == uninterrupted.batches
    assert _told(events[:2]) == "RunStarted-3 StepDone-4"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_lost_loss_stops_the_run_and_keeps_the_checkpoints(tmp_path, loss):
    engine = FakeEngine(loss=lambda step: loss if step == 3 else 1.0)
    with pytest.raises(PlaitError, match=rf"step 3: loss = {loss}"):
        _run(tmp_path, engine, steps=9, checkpoint_every=1, keep=1)
    assert _saved(tmp_path) == ["step-00000002"]


def test_a_batch_that_was_not_finite_can_be_skipped(tmp_path):
    def fail(step):
        if step == 3:
            raise NumbersError("not finite")

    every = FakeEngine()
    with pytest.raises(NumbersError) as error:
        _run(tmp_path, FakeEngine(before=fail), steps=5)
    _run(tmp_path, every, steps=5)
    assert error.value.samples is not None
    again = FakeEngine()
    _run(tmp_path, again, steps=4, left_out={error.value.samples})
    assert again.batches == [*every.batches[:2], *every.batches[3:]]


def test_a_skipped_step_may_overflow(tmp_path):
    ended, events = _run(tmp_path, FakeEngine(loss=lambda step: math.inf, skipped=True), steps=2)
    assert ended == 0
    assert all(event.skipped for event in events if isinstance(event, StepDone))


def test_on_a_gpu_numbers_are_read_one_step_late(tmp_path):
    """The engine only reports a device that is no CPU. The test checks when its results are read."""
    reads = []
    engine = FakeEngine(loss=float, device=torch.device("meta"))

    class RecordedCopy(HostCopy):
        def values(self):
            numbers = super().values()
            reads.append((int(numbers[0]), len(engine.batches)))
            return numbers

    def shared(self, device, is_due):
        return torch.tensor([float(self.number)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plait.train.loop.HostCopy", RecordedCopy)
        patch.setattr(StopRequest, "shared", shared)
        patch.setattr("plait.train.loop.peak_memory_bytes", lambda device: 0)
        _, events = _run(tmp_path, engine, steps=5, checkpoint_every=3)
    # A checkpoint and the end wait for all numbers.
    assert reads == [(1, 2), (2, 3), (3, 3), (4, 5), (5, 5)]
    assert [event.step for event in events if isinstance(event, StepDone)] == [1, 2, 3, 4, 5]
    assert sum(isinstance(event, CheckpointSaved) for event in events) == 2


def test_requests_of_one_process():
    stop, cpu, notes = StopRequest(on_request=lambda: notes.append(1)), torch.device("cpu"), []
    assert float(stop.shared(device=cpu)) == 0
    # One number says that a checkpoint is due and that the run stops. A run that ends writes one anyway.
    assert float(stop.shared(device=cpu, is_due=True)) == 0.5
    stop._handle(signal.SIGINT, None)
    assert notes == [1], "the user is told at once"
    assert float(stop.shared(device=cpu)) == signal.SIGINT
    stop = StopRequest()
    stop.ask()
    assert int(stop.shared(device=cpu, is_due=True)) == STOP_REQUESTED


def test_a_rank_that_is_lost_is_named(monkeypatch):
    """Otherwise gloo's error would be the whole message, with exit code 1."""

    def lose(*_, **__):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    # A group of two ranks whose other rank has ended, without the processes.
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", lose)
    with pytest.raises(CommunicationError, match="requests to stop: rank 0 lost the connection"):
        StopRequest().shared(device=torch.device("cpu"))
