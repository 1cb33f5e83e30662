"""Computations of a pipeline and messages between its stages, with their dependencies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """Kind of a computation.

    A backward is either unsplit (B), or split in two (I and W) so that the second half can fill a
    bubble.
    """

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the stage's input and of its weights."""
    INPUT = "I"
    """Gradient of the stage's input only, which the previous stage waits for."""
    WEIGHT = "W"
    """Gradients of the stage's weights. It runs after I of the same micro-batch."""


@dataclass(frozen=True, slots=True)
class Action:
    """Computation of a stage on a micro-batch.

    It is printed as `2F0`: stage 2, forward, micro-batch 0.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Payload(StrEnum):
    """Kind of a tensor that a stage sends to a neighbouring stage."""

    ACTIVATION = "activation"
    """Output of a forward, for the next stage."""
    GRADIENT = "gradient"
    """Gradient of a stage's input, for the previous stage."""


class Message(NamedTuple):
    """Payload, the stage that produces it, and its micro-batch."""

    payload: Payload
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"the {self.payload} of stage {self.stage} for micro-batch {self.microbatch}"


class Numbered:
    """Numbers the messages of a pipeline from 0.

    A lookup in a list is several times faster than in a set, and tables have tens of thousands of
    messages.
    """

    def __init__(self, *, stages: int, microbatches: int) -> None:
        self._microbatches = microbatches
        self._stages = stages
        self.gradients = stages * microbatches
        """Number of the first gradient. Activations come before it."""

    @property
    def size(self) -> int:
        """Number of messages."""
        return 2 * self.gradients

    def needed_by(self, action: Action) -> tuple[int, ...]:
        """Return the numbers of the messages that must exist before a computation can start.

        If a backward needs two, the activation of its own stage comes before the gradient of the
        next stage.
        """
        index = action.stage * self._microbatches + action.microbatch
        kind = action.kind
        if kind is Kind.FORWARD:
            # The first stage reads the batch.
            if action.stage == 0:
                return ()
            return (index - self._microbatches,)
        # The second half of a backward needs the first half of the same stage only.
        if kind is Kind.WEIGHT:
            return (self.gradients + index,)
        # The last stage computes the loss, so no other stage sends it a gradient.
        if action.stage == self._stages - 1:
            return (index,)
        return (index, self.gradients + index + self._microbatches)

    def produced_by(self, action: Action) -> int | None:
        """Return the message that a computation produces, or None for W, which produces none."""
        if action.kind is Kind.WEIGHT:
            return None
        index = action.stage * self._microbatches + action.microbatch
        if action.kind is Kind.FORWARD:
            return index
        return self.gradients + index

    def stage(self, number: int) -> int:
        """Return the stage that produces a message."""
        return number % self.gradients // self._microbatches

    def message(self, number: int) -> Message:
        """Return the message of a number."""
        payload = Payload.GRADIENT
        if number < self.gradients:
            payload = Payload.ACTIVATION
        return Message(payload, self.stage(number), number % self._microbatches)
