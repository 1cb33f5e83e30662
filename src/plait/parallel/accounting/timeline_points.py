"""Points of a forward and a backward, with the bytes that are allocated at each, as numbers.

`dryrun.predicted_peak` measures them for one micro-batch of a stage on fake tensors, and `peak`
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
"""Units that are not blocks.

BESIDE: before, between and outside of the blocks. HEAD: from the last block's output to the model's
output. LOSS: the loss.
"""

Direction = Literal["forward", "backward", "weights"]
"""Direction of a computation.

`weights` is the second half of a split backward. The first half is a `backward`.
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
"""Kinds of memory of a peak, with their names for the user."""


@dataclass(frozen=True)
class Alive:
    """Bytes of one micro-batch by kind."""

    activations: int = 0
    """Tensors of the forward, in the blocks and before them."""
    logits: int = 0
    """Tensors of the forward in head and loss."""
    temporaries: int = 0
    """Tensors of the backward: gradients of activations, and recomputed activations."""
    gradients: int = 0
    """Gradients of a block's parameters, or of a head that is a unit, in the compute dtype."""
    root_gradients: int = 0
    """Gradients of all other parameters outside of the blocks."""

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return (
            self.activations + self.logits + self.temporaries + self.gradients + self.root_gradients
        )


@dataclass(frozen=True)
class Moment:
    """Interval of a computation between two points."""

    direction: Direction
    unit: int
    """Index of the block on the rank, or BESIDE, HEAD or LOSS."""
    peak: Alive
    """Peak if a parameter's gradient is gone at once, added to another or moved to a bucket."""
    peak_with_gradients: Alive
    """Peak if gradients stay until the backward of their unit ends.

    Gradients outside of the blocks stay until the backward of the model ends.
    """
    end: Alive
    """Bytes at the end, with gradients."""


@dataclass(frozen=True)
class StageMoments:
    """Moments of one micro-batch in one stage, or in the model without a pipeline."""

    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...] = ()
    """Unsplit backward. Empty if the schedule has none."""
    inputs: tuple[Moment, ...] = ()
    """First half of a split backward. Empty if none is split."""
    weights: tuple[Moment, ...] = ()
    """Second half of a split backward."""


@dataclass(frozen=True)
class StepFacts:
    """Measurements of a rank's step on fake tensors."""

    stages: Mapping[int, StageMoments]
    boundary_bytes: int
    """Bytes of a message between two stages."""
    batch_bytes: int
    """Bytes of the input of all micro-batches of a step."""
    buffer_bytes: int
    """Bytes of the buffers of the rank's model."""
    optimizer_temporary_bytes: int
    """Most bytes that the optimizer step holds besides its states."""
    exchanges_reductions: bool = False
    """True if a reduce-scatter is an exchange into a buffer as large as its input, as on CPUs.

    See `comm.reduce_scatter`.
    """
