"""What the ZeRO stages mean at the end of a backward: the one rule, which the run, the account and
the peak memory follow.

Without a pipeline a rank has one stage, whose micro-batches are the accumulation steps, and each
unit ends its step with the last of them. In a pipeline the stages of a rank end their steps at
different times, and the root unit (what is outside of the blocks) belongs to several.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple


class AfterBackward(NamedTuple):
    """What happens to a unit that `fully_shard` gathers and reduces as one."""

    reduce: bool
    """Its gradients are reduced over dp_shard."""
    last: bool
    """They are complete: for the last time in this step, so they are summed over dp_replicate too.
    """
    free: bool
    """Its gathered parameters are freed."""


def of_block(zero: int, left: Mapping[int, int], *, ran: int, own: int) -> AfterBackward:
    """A block of pipeline stage `own`, after a backward of stage `ran`. `left`: backwards that each
    stage of the rank has to run in this step, this one included.
    """
    if own != ran:
        return AfterBackward(False, False, False)
    last = left[own] == 1
    return AfterBackward(zero >= 2 or last, last, zero == 3 or last)


def of_root(
    zero: int, left: Mapping[int, int], *, ran: int, users: Collection[int]
) -> AfterBackward:
    """The root unit, which the stages `users` of the rank compute gradients of, after a backward of
    stage `ran`. Every stage gathers it.
    """
    last = ran in users and sum(left[stage] for stage in users) == 1
    return AfterBackward(
        ran in users and (zero >= 2 or last), last, zero == 3 or sum(left.values()) == 1
    )
