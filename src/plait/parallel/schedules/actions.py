"""The computations of a pipeline and the messages between its stages: what each needs, and what it
produces.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What is computed. A backward is either unsplit (B) or split in two, so that the second half
    can fill a bubble.
    """

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of the stage's input and of its weights."""
    INPUT = "I"
    """The gradient of the stage's input alone: what the stage before waits for."""
    WEIGHT = "W"
    """The gradients of the stage's weights, some time after I."""


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of one stage on one micro-batch. Printed as `2F0`: stage 2, forward,
    micro-batch 0.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Payload(StrEnum):
    """What passes between two neighbouring stages."""

    ACTIVATION = "activation"
    """The output of a forward, for the stage after."""
    GRADIENT = "gradient"
    """The gradient of a stage's input, for the stage before."""


class Message(NamedTuple):
    """A payload, the stage that produces it, and the micro-batch."""

    payload: Payload
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"the {self.payload} of stage {self.stage} for micro-batch {self.microbatch}"


class Numbered:
    """Messages of a pipeline as whole numbers from 0: to look one up in a list is several times
    faster than in a set, and tables have tens of thousands.
    """

    def __init__(self, *, stages: int, microbatches: int) -> None:
        self._microbatches = microbatches
        self._stages = stages
        self.gradients = stages * microbatches
        """The first of the gradients; activations are before."""

    @property
    def size(self) -> int:
        """How many there are."""
        return 2 * self.gradients

    def needed_by(self, action: Action) -> tuple[int, ...]:
        """What must exist before a computation can start: the stage's own earlier result first,
        then its neighbour's.
        """
        at = action.stage * self._microbatches + action.microbatch
        kind = action.kind
        if kind is Kind.FORWARD:
            return (at - self._microbatches,) if action.stage else ()
        if kind is Kind.WEIGHT:
            return (self.gradients + at,)
        return (
            (at, self.gradients + at + self._microbatches)
            if action.stage < self._stages - 1
            else (at,)
        )

    def produced_by(self, action: Action) -> int | None:
        """What a computation sends; None for W, for which nothing waits."""
        if action.kind is Kind.WEIGHT:
            return None
        at = action.stage * self._microbatches + action.microbatch
        return at if action.kind is Kind.FORWARD else self.gradients + at

    def stage(self, number: int) -> int:
        """The stage that produces a message."""
        return number % self.gradients // self._microbatches

    def message(self, number: int) -> Message:
        """The message that a number stands for."""
        payload = Payload.ACTIVATION if number < self.gradients else Payload.GRADIENT
        return Message(payload, self.stage(number), number % self._microbatches)
