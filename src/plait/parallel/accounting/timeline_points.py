"""Timeline points of a forward and a backward, and the allocated bytes at each: figures, no
tensors.

`dryrun.predicted_peak` measures them for one micro-batch of a stage on fake tensors; `peak`
combines them to a full step. A point ends where something about the parameters changes: a block
begins or ends, the loss is reached, a gradient arrives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

BESIDE = -1
HEAD = -2
LOSS = -3
"""Units that are no block: before, between and outside of the blocks; from the last block's output
to the model's; the loss.
"""

Direction = Literal["forward", "backward", "weights"]
"""`weights` is the second half of a backward that is split in two; the first half is a `backward`
too.
"""


PEAK_KINDS: dict[str, str] = {
    "parameters": "parameters (their shards)",
    "optimizer": "optimizer states",
    "gradients": "gradients (their shards)",
    "gathered_parameters": "gathered parameters",
    "unsharded_gradients": "unsharded gradients",
    "communication": "buffers of gathers and reductions",
    "activations": "activations of all micro-batches in flight",
    "logits": "logits and loss",
    "temporaries": "temporaries of backward or of the optimizer",
    "messages": "tensors in flight between stages",
    "batch": "the batch",
    "buffers": "buffers of the model",
}
"""What a peak is made of, and what to call it."""


@dataclass(frozen=True)
class Alive:
    """Bytes of one micro-batch."""

    activations: int = 0
    """Made in forward, in the blocks and before them."""
    logits: int = 0
    """Made in forward by head and loss."""
    temporaries: int = 0
    """Made in backward: gradients of activations, what is computed again."""
    gradients: int = 0
    """Gradients of the block's parameters, or of a head that is a sharding unit, in the dtype of
    computation.
    """
    root_gradients: int = 0
    """Gradients of the other parameters outside of the blocks."""

    @property
    def total(self) -> int:
        """All of it."""
        return (
            self.activations + self.logits + self.temporaries + self.gradients + self.root_gradients
        )


@dataclass(frozen=True)
class Moment:
    """One stretch of a computation."""

    direction: Direction
    unit: int
    """Index of the block on the rank; BESIDE, HEAD or LOSS."""
    peak: Alive
    """The most that was alive, where a parameter's gradient is gone as soon as it is made (added to
    another, or put into a bucket).
    """
    peak_with_gradients: Alive
    """The same where gradients of a block stay until its backward ends, and those of other
    parameters until the backward of the model does.
    """
    end: Alive
    """What is left at the end; with gradients."""


@dataclass(frozen=True)
class StageMoments:
    """One micro-batch through one stage (without a pipeline: through the model)."""

    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...] = ()
    """A whole backward; empty where the schedule has none."""
    inputs: tuple[Moment, ...] = ()
    """The first half of a backward that is split in two; empty where none is."""
    weights: tuple[Moment, ...] = ()
    """The second half."""


@dataclass(frozen=True)
class StepFacts:
    """What a rank's step consists of, measured on fake tensors."""

    stages: Mapping[int, StageMoments]
    boundary_bytes: int
    """What passes between two stages."""
    batch_bytes: int
    """Input of all micro-batches of a step."""
    buffer_bytes: int
    """Buffers of the rank's model."""
    optimizer_temporary_bytes: int
    """The most that the optimizer's step holds besides its states."""
    exchanges_reductions: bool = False
    """Whether a reduce-scatter is an exchange into a buffer as large as its input, as on CPUs
    (`comm.reduce_scatter`).
    """
