"""Events of a run. The engine and the training loop emit them; `observe` only listens.

Emitting an event must never change a result of the run. Events therefore carry plain Python values
that the run has read anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class RunStarted:
    """Start of a run, or its continuation at `first_step`."""

    first_step: int
    last_step: int
    world_size: int
    parameters: int
    layout: str
    folder: str
    communication: str = ""
    """Algorithms by which ranks exchange gradients, parameters and sequences, with the reasons."""
    notable_communication: str = ""
    """The part of `communication` that is not the default; the progress lines show only this."""
    resumed: tuple[str, ...] = ()
    """Differences between this run and the one that wrote the checkpoint, one sentence each."""


@dataclass(frozen=True)
class StepDone:
    """End of an optimizer step over all ranks.

    Attributes:
        loss: Weighted mean of the loss over all ranks.
        grad_norm: Global norm of the unscaled gradients before clipping.
        weight: Denominator of `loss`: target tokens for a language model.
        memory_bytes: Peak memory of this rank.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float
    skipped: bool
    weight: float
    tokens: int
    seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class CommunicationSelected:
    """Algorithm for the gradient exchange, selected in the first steps.

    It is used in the steps after `step`.
    """

    step: int
    communication: str


@dataclass(frozen=True)
class Validated:
    """Loss over the validation split, weighted by target tokens over all ranks."""

    step: int
    loss: float
    weight: float
    seconds: float


@dataclass(frozen=True)
class CheckpointSaved:
    """Completion of a checkpoint on disk. The run can be resumed from it."""

    step: int
    folder: str
    seconds: float


@dataclass(frozen=True)
class RunEnded:
    """End of the loop. `reason` is `finished`, `interrupted` or `ended by a callback`."""

    step: int
    reason: str
    seconds: float
    folder: str


Event = RunStarted | StepDone | CommunicationSelected | Validated | CheckpointSaved | RunEnded
Listener = Callable[[Event], None]
