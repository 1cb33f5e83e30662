"""The training loop: steps, validation, checkpoints, a clean stop. It notifies listeners and prints
nothing itself.

Every rank runs it with the same numbers and takes the same decisions: what one rank alone knows (a
signal) is agreed on first. The data of a step is a function of the position, so a run that was
resumed computes what an uninterrupted one would.

Note [Reading a step's numbers]
    A GPU works behind the program. If the loop read the loss of a step at once, the device would
    idle until the program has queued the next step. The numbers are therefore copied to pinned
    memory behind the step, and read when the next step is queued. That wait ends with the copy
    (`.item()` would wait for the next step too), and it keeps the program at most one step ahead.

    Listeners hear of a step one step late. Where something depends on the numbers (validation, a
    checkpoint, the end), all of them are read first, so a checkpoint never holds a step whose
    numbers nobody has looked at. All ranks read at the same positions, so they stop at the same
    one.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from plait.checkpoint.folder import remove_old
from plait.checkpoint.places import Place
from plait.cluster.host_copy import HostCopy
from plait.config.schema.sections import RunSection
from plait.data.loader import Batches
from plait.errors import NumbersError
from plait.events import (
    CheckpointSaved,
    CommunicationDecided,
    Listener,
    RunEnded,
    RunStarted,
    Sampled,
    StepDone,
    Validated,
)
from plait.train.clock import StepClock
from plait.train.memory import peak_memory_bytes
from plait.train.stop import ASKED, StopRequest


class Trainable(Protocol):
    """What the loop needs of `plait.Engine`."""

    @property
    def device(self) -> torch.device:
        """This rank's device."""

    @property
    def rank(self) -> int:
        """This process among all."""

    def train_batch(self, batch: Any) -> Any:
        """One optimizer step on this rank's share; the result has the fields of
        `plait.StepResult`.
        """

    def eval_batch(self, batch: Any) -> tuple[float, float]:
        """(sum of losses, weight) over all ranks."""

    def save_checkpoint(
        self,
        folder: str | Place,
        *,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        wait: bool = True,
    ) -> Place:
        """Collective; complete on disk when it returns, or with `wait` False when
        `checkpoint_written` returns it.
        """

    def checkpoint_written(self, *, wait: bool = False) -> Place | None:
        """A checkpoint that has reached the disk since the last call."""


@dataclass(frozen=True)
class Position:
    """How far the run is: optimizer steps taken, sequences consumed."""

    step: int = 0
    samples: int = 0


@dataclass(frozen=True)
class TrainingContext:
    """Everything the loop works with."""

    engine: Trainable
    section: RunSection
    loader: Batches
    validation: Callable[[], Iterable[Any]]
    """This rank's validation batches, the same ones at each call; none where nothing is held out.
    """
    sample: Callable[[], str] | None
    """Lets the model write a text. Collective."""
    checkpoints: Place
    client_state: Mapping[str, Any]
    """Saved with every checkpoint, besides the position."""
    started: RunStarted
    stop: StopRequest
    emit: Listener
    left_out: Collection[int] = ()
    """Batches that are not trained on, by the sequences consumed before them."""
    seconds: Callable[[], float] = time.monotonic
    """Clock in seconds that decides when `RunSection.checkpoint_seconds` have passed."""


def train(context: TrainingContext, start: Position) -> int:
    """Train from `start` to `section.steps`, or until a stop is asked for. Ends with a checkpoint
    either way.

    Returns 0 when all steps are done, else the signal that asked to stop, or ASKED, the same on
    every rank. Raises NumbersError when the loss is not finite, where such steps are not skipped;
    the last checkpoint is kept as it is.
    """
    section = context.section
    began = time.perf_counter()
    clock = StepClock(context.engine.device)
    position = start
    stopped_by = 0
    is_due = False
    validated = saved = start.step
    # See Note [Reading a step's numbers].
    behind = 0 if context.engine.device.type == "cpu" else 1
    unread: deque[_QueuedStep] = deque()
    context.emit(context.started)
    saving = _Saving(context)
    while position.step < section.steps and not stopped_by:
        while position.samples in context.left_out:
            position = Position(position.step, position.samples + context.loader.batch)
        try:
            result = context.engine.train_batch(context.loader.at(position.samples))
        except NumbersError as error:
            error.samples = position.samples
            raise
        position = Position(position.step + 1, position.samples + context.loader.batch)
        stop = context.stop.shared(device=context.engine.device, is_due=saving.is_due())
        unread.append(_QueuedStep(position.step, result, _copied(result, stop), clock.mark()))
        validates = _due(position.step, section.validate_every)
        saves = is_due or _due(position.step, section.checkpoint_every)
        pause = validates or saves or position.step == section.steps
        while len(unread) > (0 if pause or stopped_by else behind):
            queued = unread.popleft()
            done, request = _step_done(queued, context, clock)
            stopped_by = stopped_by or int(request)
            # All ranks read it at the same position, so all of them save after the next step.
            is_due = is_due or request % 1 > 0
            context.emit(done)
            if queued.result.decided:
                context.emit(CommunicationDecided(queued.step, queued.result.decided))
        if validates:
            _validate(context, position.step)
            validated = position.step
        if saves:
            saving.begin(position)
            saved = position.step
            is_due = False
        saving.report(wait=False)
        if validates or saves:
            clock.restart()
    finished = position.step == section.steps
    if finished and validated < position.step:
        _validate(context, position.step)
    if saved < position.step:
        saving.begin(position)
    saving.report(wait=True)
    if finished and context.sample is not None and section.sample is not None:
        context.emit(Sampled(position.step, section.sample.prompt, context.sample()))
    seconds = time.perf_counter() - began
    reason = (
        "finished" if finished else "ended by a callback" if stopped_by == ASKED else "interrupted"
    )
    context.emit(RunEnded(position.step, reason, seconds, context.started.folder))
    return 0 if finished else stopped_by


@dataclass(frozen=True)
class _QueuedStep:
    """A step that the device may still be computing."""

    step: int
    result: Any
    """Result of `train_batch`."""
    numbers: HostCopy
    """Loss, gradient norm, weight and stop request, which the device computes."""
    ended: Any
    """End of the step, as the clock marked it."""


def _copied(result: Any, stop: torch.Tensor) -> HostCopy:
    """Start the copy of a step's numbers to the host, all of them in one tensor [4] of float64."""
    numbers = (result.loss, result.grad_norm, result.weight, stop)
    return HostCopy(torch.cat([number.reshape(1).double() for number in numbers]))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _step_done(
    queued: _QueuedStep, context: TrainingContext, clock: StepClock
) -> tuple[StepDone, float]:
    """Wait for a step, and no other, and return its event and what ranks agreed on in it
    (`StopRequest.shared`).

    Raises:
        NumbersError: The loss or the gradients are not finite, and such steps are not skipped.
    """
    loss, grad_norm, weight, stop = queued.numbers.values().tolist()
    result = queued.result
    event = StepDone(
        step=queued.step,
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=float(result.learning_rate),
        loss_scale=float(result.loss_scale),
        skipped=bool(result.skipped),
        weight=weight,
        tokens=context.loader.batch * context.loader.length,
        seconds=clock.seconds(queued.ended),
        memory_bytes=peak_memory_bytes(context.engine.device),
    )
    # Other steps are skipped, or end in an error before the update; updates in the backward have
    # come before that.
    if not event.skipped and not (math.isfinite(event.loss) and math.isfinite(event.grad_norm)):
        raise NumbersError(
            f"step {event.step}: loss = {event.loss}, gradient norm = {event.grad_norm}: the run"
            " has diverged and was stopped without a checkpoint; lower the learning rate or set"
            " gradient_clipping, and run the command again to go on from the last one in"
            f" {context.checkpoints}"
        )
    return event, stop


def _validate(context: TrainingContext, step: int) -> None:
    began = time.perf_counter()
    total = 0.0
    weight = 0.0
    for batch in context.validation():
        found, weighed = context.engine.eval_batch(batch)
        total = total + float(found)
        weight = weight + float(weighed)
    if weight:
        context.emit(Validated(step, total / weight, weight, time.perf_counter() - began))


@dataclass
class _Saving:
    """Checkpoints are written beside the training, and reported when they are on the disk."""

    context: TrainingContext
    _position: Position | None = None
    _began: float = 0.0
    _last: float = 0.0
    """Time at which the last checkpoint, or else the run, began."""

    def __post_init__(self) -> None:
        self._last = self.context.seconds()

    def is_due(self) -> bool:
        every = self.context.section.checkpoint_seconds
        return every > 0 and self.context.seconds() - self._last >= every

    def begin(self, position: Position) -> None:
        self.report(wait=True)
        self._last = self.context.seconds()
        self._position, self._began = position, time.perf_counter()
        state = {
            **self.context.client_state,
            "step": position.step,
            "samples": position.samples,
            "loader": self.context.loader.state(),
        }
        tag = f"step-{position.step:08d}"
        self.context.engine.save_checkpoint(
            self.context.checkpoints, tag=tag, client_state=state, wait=False
        )

    def report(self, *, wait: bool) -> None:
        path = (
            self.context.engine.checkpoint_written(wait=wait)
            if self._position is not None
            else None
        )
        if path is None or self._position is None:
            return
        if self.context.engine.rank == 0:
            remove_old(self.context.checkpoints, keep=self.context.section.keep)
        self.context.emit(
            CheckpointSaved(self._position.step, str(path), time.perf_counter() - self._began)
        )
        self._position = None
