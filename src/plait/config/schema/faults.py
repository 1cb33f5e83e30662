"""The section about what goes wrong in a run: how long ranks wait for each other, and what is
checked in every step.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from plait.config.values.numbers import Finite, Flag, Whole
from plait.policy import Policy

LONGEST_SECONDS = 30 * 24 * 3600.0


class FaultsSection(Policy):
    """Hangs, and numbers that are not finite."""

    timeout_seconds: Annotated[Finite, Field(ge=1, le=LONGEST_SECONDS)] = 600.0
    """How long a process may wait for the others in a collective before the run counts as hung: it
    ends then, with the name of the process that is late. A process group that exists already keeps
    its own timeout.
    """
    non_finite: Literal["auto", "raise", "skip"] = "auto"
    """What becomes of a step whose loss or gradients are not finite, on all processes and before
    the update: "raise" ends the run, "skip" leaves the step out. "auto": skip where fp16 scales the
    loss and with bf16.check_grad_overflow, else raise; on a GPU, which is then not waited for in
    every step, `plait train` raises after the update, and before anything is saved. With fp16 an
    overflow of the gradients is always skipped, because it sets the loss scale.
    """
    check_collectives: Flag = False
    """A debug mode: before a collective begins, its processes compare operation, shapes, dtypes and
    lines, so that those that issue different ones end with an error that names both lines. Several
    times slower, and without shared memory.
    """
    compare_replicas_every: Annotated[Whole, Field(ge=0)] = 0
    """Steps between comparisons of what several processes hold the same copy of, to the bit: a
    flipped bit ends the run and is named. What is sharded over all processes has no copy. 0: never.
    """
