"""Training loop: steps, validation, checkpoints, and a clean stop.

Every rank runs the loop with the same metrics and makes the same decisions. A signal may reach only
one rank, so ranks exchange signals before they act on them. The data of a step is a function of the
position, so a resumed run computes what an uninterrupted run would. The loop notifies listeners and
prints nothing itself.

Note [Reading a step's metrics]
    A GPU runs asynchronously. If the loop read the loss of a step immediately, the device would
    idle until the program has queued the next step. The metrics are therefore copied to pinned
    memory after the step, and read when the next step is queued. Reading waits only for the copy,
    whereas `.item()` would also wait for the next step. The wait keeps the program at most one step
    ahead.

    Listeners receive the event of a step one step late. Before validation, a checkpoint and the end
    of the run, the metrics of all queued steps are read, so a checkpoint never contains a step
    whose metrics were not checked. All ranks read at the same positions, so they stop at the same
    position.

Note [Stopping together]
    A signal reaches the ranks at different times, or reaches only one of them. A single rank that
    stopped would leave the others waiting in a collective forever. All ranks therefore stop after
    the first step in which any of them received a request.
"""

from __future__ import annotations

import math
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist

from plait.checkpoint.folder import remove_old
from plait.checkpoint.places import Place
from plait.cluster import accelerator
from plait.cluster.accelerator import HostCopy
from plait.comm.failures import naming
from plait.config.schema.sections import RunSection
from plait.data.loader import BatchSource
from plait.engine.engine import Engine
from plait.errors import NumbersError
from plait.events import (
    CheckpointSaved,
    CommunicationSelected,
    Listener,
    RunEnded,
    RunStarted,
    StepDone,
    Validated,
)

# Schedulers of clusters send SIGUSR1 shortly before a time limit.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

STOP_REQUESTED = 1
"""Code of a stop request by the program itself, instead of a signal number.

It is less than any signal of `_SIGNALS`, so that the signal wins if both occur.
"""


@dataclass(frozen=True)
class Position:
    """Progress of a run: optimizer steps taken and sequences consumed."""

    step: int = 0
    samples: int = 0


@dataclass(frozen=True)
class TrainingContext:
    """Objects that the training loop works with.

    Attributes:
        engine: Engine that takes the steps.
        section: Section `run` of the configuration.
        loader: Loader of the training batches, addressed by position.
        validation: Returns this rank's validation batches, the same at each call; no batches if no
            text is set aside for validation.
        checkpoints: Folder of the checkpoints.
        client_state: State that is saved with every checkpoint, in addition to the position.
        started: Event that is emitted before the first step.
        stop: Stop request, set by a signal or a callback.
        emit: Listener that receives all events.
        left_out: Batches to skip. Each is given by the number of sequences consumed before it.
        seconds: Clock in seconds that decides when `RunSection.checkpoint_seconds` have passed.
    """

    engine: Engine
    section: RunSection
    loader: BatchSource
    validation: Callable[[], Iterable[Any]]
    checkpoints: Place
    client_state: Mapping[str, Any]
    started: RunStarted
    stop: StopRequest
    emit: Listener
    left_out: Collection[int] = ()
    seconds: Callable[[], float] = time.monotonic


def train(context: TrainingContext, start: Position) -> int:
    """Train from `start` to `section.steps`, or until a stop is requested. Collective.

    The run ends with a checkpoint in both cases.

    Returns:
        0 if all steps are done, else the signal that requested the stop, or STOP_REQUESTED. The
        result is the same on every rank.

    Raises:
        NumbersError: The loss is not finite, and `faults.non_finite` does not skip such steps. The
            last checkpoint stays as it is.
    """
    section = context.section
    began = time.perf_counter()
    reader = _StepReader(context)
    position = start
    validated_step = start.step
    saved_step = start.step
    context.emit(context.started)
    checkpoints = _CheckpointWriter(context)

    while position.step < section.steps and not reader.stopped_by:
        while position.samples in context.left_out:
            position = Position(position.step, position.samples + context.loader.batch)
        try:
            result = context.engine.train_batch(context.loader.at(position.samples))
        except NumbersError as error:
            error.samples = position.samples
            raise
        position = Position(position.step + 1, position.samples + context.loader.batch)
        stop = context.stop.shared(device=context.engine.device, is_due=checkpoints.is_due())
        reader.add(position.step, result, stop)

        # See Note [Reading a step's metrics].
        validates = _is_multiple(position.step, section.validate_every)
        saves = reader.checkpoint_due or _is_multiple(position.step, section.checkpoint_every)
        reader.read(every_step=validates or saves or position.step == section.steps)

        if validates:
            _validate(context, position.step)
            validated_step = position.step
        if saves:
            checkpoints.begin(position)
            saved_step = position.step
            reader.checkpoint_due = False
        checkpoints.report(wait=False)
        if validates or saves:
            # The next step does not include the time until now.
            reader.clock.restart()

    finished = position.step == section.steps
    if finished and validated_step < position.step:
        _validate(context, position.step)
    if saved_step < position.step:
        checkpoints.begin(position)
    checkpoints.report(wait=True)

    reason = "interrupted"
    if finished:
        reason = "finished"
    elif reader.stopped_by == STOP_REQUESTED:
        reason = "ended by a callback"
    seconds = time.perf_counter() - began
    context.emit(RunEnded(position.step, reason, seconds, context.started.folder))
    return 0 if finished else reader.stopped_by


def _is_multiple(step: int, interval: int) -> bool:
    """Return True if the step is a multiple of the interval; 0 means never."""
    return interval > 0 and step % interval == 0


def _validate(context: TrainingContext, step: int) -> None:
    began = time.perf_counter()
    total_loss = 0.0
    total_weight = 0.0
    for batch in context.validation():
        loss, weight = context.engine.eval_batch(batch)
        total_loss += float(loss)
        total_weight += float(weight)
    if total_weight:
        seconds = time.perf_counter() - began
        context.emit(Validated(step, total_loss / total_weight, total_weight, seconds))


@dataclass
class _CheckpointWriter:
    """Writer that starts asynchronous checkpoints and reports each when it is on disk."""

    context: TrainingContext
    _position: Position | None = None
    """Position of the checkpoint that is being written, or None."""
    _began: float = 0.0
    _last: float = 0.0
    """Time at which the last checkpoint, or else the run, began."""

    def __post_init__(self) -> None:
        self._last = self.context.seconds()

    def is_due(self) -> bool:
        interval = self.context.section.checkpoint_seconds
        return interval > 0 and self.context.seconds() - self._last >= interval

    def begin(self, position: Position) -> None:
        """Start to write a checkpoint at a position. Collective.

        This waits until the previous checkpoint has been written.
        """
        self.report(wait=True)
        self._last = self.context.seconds()
        self._position = position
        self._began = time.perf_counter()
        state = {
            **self.context.client_state,
            "step": position.step,
            "samples": position.samples,
            "loader": self.context.loader.state(),
        }
        self.context.engine.save_checkpoint(
            self.context.checkpoints,
            tag=f"step-{position.step:08d}",
            client_state=state,
            wait=False,
        )

    def report(self, *, wait: bool) -> None:
        """If the checkpoint is on disk, emit its event and remove old checkpoints."""
        if self._position is None:
            return
        path = self.context.engine.checkpoint_written(wait=wait)
        if path is None:
            return

        if self.context.engine.rank == 0:
            remove_old(self.context.checkpoints, keep=self.context.section.keep)
        seconds = time.perf_counter() - self._began
        self.context.emit(CheckpointSaved(self._position.step, str(path), seconds))
        self._position = None


@dataclass(frozen=True)
class _PendingStep:
    """Step that the device may still be computing.

    Attributes:
        step: Number of the step, from 1.
        result: Result of `train_batch`.
        numbers: Loss, gradient norm, weight and stop request, which the device computes.
        end: End of the step, as `StepClock.mark` returned it.
    """

    step: int
    result: Any
    numbers: HostCopy
    end: Any


class _StepReader:
    """Reader of the metrics of queued steps. It emits the events of these steps.

    See Note [Reading a step's metrics].

    Attributes:
        stopped_by: Signal that stops the run, STOP_REQUESTED, or 0.
        checkpoint_due: Whether the ranks agreed to save a checkpoint after the next step.
        clock: Clock of the steps.
    """

    def __init__(self, context: TrainingContext) -> None:
        self.stopped_by = 0
        self.checkpoint_due = False
        self._context = context
        self.clock = StepClock(context.engine.device)
        self._unread: deque[_PendingStep] = deque()
        self._most_unread = 0 if context.engine.device.type == "cpu" else 1

    def add(self, step: int, result: Any, stop: torch.Tensor) -> None:
        """Start the asynchronous copy of a step's metrics to the host."""
        scalars = (result.loss, result.grad_norm, result.weight, stop)
        # One float64 tensor [4], so that one copy suffices.
        numbers = HostCopy(torch.cat([scalar.reshape(1).double() for scalar in scalars]))
        self._unread.append(_PendingStep(step, result, numbers, self.clock.mark()))

    def read(self, *, every_step: bool) -> None:
        """Wait for queued steps and emit their events.

        Args:
            every_step: Whether to also read the last step, although no later step is queued.
        """
        while self._unread:
            # A run that stops takes no further step behind which the last one could be read.
            reads_all = every_step or bool(self.stopped_by)
            if not reads_all and len(self._unread) <= self._most_unread:
                return
            queued = self._unread.popleft()
            event, request = self._wait(queued)
            self.stopped_by = self.stopped_by or int(request)
            # All ranks read it at the same position, so all of them save after the next step.
            self.checkpoint_due = self.checkpoint_due or request % 1 > 0
            self._context.emit(event)
            if queued.result.decided:
                self._context.emit(CommunicationSelected(queued.step, queued.result.decided))

    def _wait(self, queued: _PendingStep) -> tuple[StepDone, float]:
        """Wait for one step, and return (its event, the result of `StopRequest.shared`).

        Raises:
            NumbersError: The loss or the gradients are not finite, and `faults.non_finite` does not
                skip such steps.
        """
        context = self._context
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
            seconds=self.clock.seconds(queued.end),
            memory_bytes=peak_memory_bytes(context.engine.device),
        )
        # Most steps with such numbers are skipped, or raise before the update. They arrive here if
        # the backward pass already updated the parameters.
        if not event.skipped and not (math.isfinite(event.loss) and math.isfinite(event.grad_norm)):
            raise NumbersError(
                f"step {event.step}: loss = {event.loss}, gradient norm = {event.grad_norm}: the"
                " run has diverged and was stopped without a checkpoint; lower the learning rate or"
                " set gradient_clipping, and run the command again to continue from the last"
                f" checkpoint in {context.checkpoints}"
            )
        return event, stop


class StepClock:
    """Clock for the time between the ends of consecutive steps.

    A GPU runs behind the program: when the metrics of a step are read, the next step may be queued
    or even finished. The clock therefore records the end of a step as an event on the device. On a
    CPU a step has ended when `seconds` is called.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if accelerator.is_accelerator(device) else None
        self.restart()

    def restart(self) -> None:
        """Start the next measurement now."""
        self._last = self.mark()
        if self._last is None:
            self._last = time.perf_counter()

    def mark(self) -> Any:
        """Record an event after the work queued so far, and return it. None on a CPU."""
        if self._device is None:
            return None
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, end: Any) -> float:
        """Return the seconds from the previous step's end, or from `restart`, to `end`.

        This waits for the device.

        Args:
            end: Result of `mark` at the end of a step. Steps must be passed in their order.
        """
        previous = self._last
        if end is None:
            self._last = time.perf_counter()
            return float(self._last - previous)

        self._last = end
        end.synchronize()
        return float(previous.elapsed_time(end)) / 1e3


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process, without waiting for a device.

    Returns:
        Bytes: on a GPU the peak of the allocator since the process started, on a CPU the peak
        resident set size.
    """
    if accelerator.is_accelerator(device):
        return accelerator.peak_bytes(device)

    # `getrusage` on Linux starts from the peak of the parent process.
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The unit is bytes on macOS and KiB elsewhere.
    return peak if sys.platform == "darwin" else peak * 1024


class StopRequest:
    """Context manager that turns signals into a request to stop.

    The first SIGINT, SIGTERM or SIGUSR1 is recorded. A second SIGINT raises KeyboardInterrupt.

    Args:
        on_request: Called by the signal handler when a signal is recorded.

    Attributes:
        number: Signal that was received, STOP_REQUESTED, or 0 without a request.
    """

    def __init__(self, *, on_request: Callable[[], None] | None = None) -> None:
        self.number = 0
        self._on_request = on_request
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._previous_handlers = {
            number: signal.signal(number, self._handle) for number in _SIGNALS
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        if self._on_request is not None:
            self._on_request()

    def ask(self) -> None:
        """Request the end of the run, as a signal does, but with exit code 0."""
        self.number = self.number or STOP_REQUESTED

    def shared(self, *, device: torch.device, is_due: bool = False) -> torch.Tensor:
        """Return the stop request, combined over all processes of the default group. Collective.

        Every process calls this in every step. Without a process group the result is the stop
        request of this process. See Note [Stopping together].

        Args:
            device: Device of the result.
            is_due: Whether a checkpoint is due by the clock of this process. Clocks differ.

        Returns:
            A float64 tensor [1] on `device`, which the loop reads together with the metrics of the
            step. It is the maximum over all processes. Its integral part is the signal that stops
            the run, STOP_REQUESTED, or 0. Its fraction is 0.5 if a checkpoint is due. A signal on
            one process can hide the fraction of another, but a run that stops writes a checkpoint
            anyway.
        """
        number = self.number + 0.5 * is_due
        # `full` is a kernel. A tensor made from a Python number would be copied to the device.
        request = torch.full((1,), number, dtype=torch.float64, device=device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            with naming("all-reduce of requests to stop"):
                dist.all_reduce(request, op=dist.ReduceOp.MAX)
        return request
